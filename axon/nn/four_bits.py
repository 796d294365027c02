"""Weights in 4 bits: codes for blocks of inputs, decoded where they are multiplied."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Names, base, decoding_einsum
from axon.axes.patterns import Contraction
from axon.errors import UserError
from axon.nn.param import Param, ParamSpec
from axon.nn.weight_transform import Operand, beside
from axon.parallel.expert import Matrix
from axon.precision.codebook import Codebook, packed, unpacked
from axon.precision.dynamic_code import Blocks, decoded, encoded
from axon.precision.formats import mx_scales
from axon.precision.microscaling import mx_packed

GROUP = 256
"""How many scales share one of their own, of neighbouring outputs; the most below that divide them, where it does not.
"""


@dataclass(frozen=True)
class FourBits:
    """A format of 4 bits.

    Args:
        book: what the codes stand for. block: how many neighbours along the last input share a scale; all, if it has
            fewer. scales: how they are kept: bfloat16; "dynamic8", 8 bits with scales of their own (arXiv:2305.14314,
            section 3); "e8m0", powers of two in a byte, with the rounding of `axon.precision.microscaling`.
    """

    book: Codebook
    block: int
    scales: Literal["bfloat16", "dynamic8", "e8m0"] = "bfloat16"


class FourBitWeight(Operand):
    """A frozen matrix W as `codes`, two a byte along its last input; `scales`, of blocks along that; and with double
    quantisation `coarse`, float32, the scales of scales.

    A product decodes W where it is multiplied, in the forward and again in the backward: only codes and scales are
    stored, gathered, and kept.

    Raises `UserError` for a weight whose blocks are not even.
    """

    def __init__(self, weight: Param, spec: ParamSpec, form: FourBits):
        inputs = [i for i, name in enumerate(weight.axes) if name in spec.inputs]
        outputs = [i for i in range(len(weight.axes)) if i not in inputs]
        sizes = dict(zip(weight.axes, spec.shape[spec.stack :], strict=True))
        along, across = weight.axes[inputs[-1]], weight.axes[outputs[-1]]
        self.form, self.axis = form, inputs[-1] - len(weight.axes)
        self.block = min(form.block, sizes[along])
        self.group = next(n for n in range(min(GROUP, sizes[across]), 0, -1) if sizes[across] % n == 0)
        for length in (self.block, 2):
            if sizes[along] % length:
                raise UserError(
                    f"blocks of {length} do not divide the axis {along!r} of {sizes[along]} of a weight of "
                    f"{' '.join(weight.axes)}: set Quantize.block, or leave it out of Quantize.paths"
                )
        blocks = {base(along): sizes[along] // self.block}
        options = {"trained": False, "decay": False}
        self.codes = beside(
            weight, weight.axes, not_drawn, jnp.uint8, sizes={base(along): sizes[along] // 2}, **options
        )
        kept = jnp.bfloat16 if form.scales == "bfloat16" else jnp.uint8
        self.scales = beside(weight, weight.axes, not_drawn, kept, sizes=blocks, **options)
        if form.scales == "dynamic8":
            groups = blocks | {base(across): sizes[across] // self.group}
            self.coarse = beside(weight, weight.axes, not_drawn, jnp.float32, sizes=groups, **options)
        self.across = outputs[-1] - len(weight.axes)

    @property
    def axes(self) -> Names:
        return self.codes.axes

    def contract(self, contraction: Contraction, x: Array) -> Array:
        return decoding_einsum(contraction, x, self.codes, self._decoded, self._parts)

    def grouped(self, bias: Any) -> Matrix:
        return Matrix(self.codes.get_value(), bias=bias, parts=self._parts, decode=self._decoded)

    def flops(self, seq: int) -> int:
        """See `axon.nn.capabilities.CountsFlops`: a byte holds two numbers."""
        return 4 * math.prod(self.codes.get_value().shape[len(self.codes.stack) :])

    def derived(self, value: Array) -> dict[str, Array]:
        """Each device's blocks are its own."""
        codes = axes.per_device(self._encoded, (self._spec,), (self._spec,) * len(self._names))
        parts = codes(axes.reshard(value, self._spec))
        return dict(zip(self._names, parts, strict=True))

    def merged(self, values: Mapping[str, Array]) -> Array:
        decode = axes.per_device(self._decoded, (self._spec,) * len(self._names), self._spec)
        return decode(*(values[name] for name in self._names))

    @property
    def _names(self) -> tuple[str, ...]:
        """The parts', in the order in which they are decoded."""
        return ("codes", "scales", "coarse") if self.form.scales == "dynamic8" else ("codes", "scales")

    @property
    def _parts(self) -> list[Array]:
        """What codes are decoded with."""
        return [vars(self)[name].get_value() for name in self._names[1:]]

    @property
    def _spec(self) -> PartitionSpec:
        scope = axes.current()
        names = (*self.codes.stack, *self.axes)
        return scope.placement.spec(names, "params") if scope else PartitionSpec()

    def _encoded(self, value: Array) -> tuple[Array, ...]:
        """The parts for one device's part of the weight."""
        if self.form.scales == "e8m0":
            return mx_packed(value, self.axis, self.block)
        codes, scales = packed(value, self.axis, self.block, self.form.book)
        if self.form.scales == "bfloat16":
            return codes, scales.astype(jnp.bfloat16)
        counts = list(scales.shape)
        counts[self.across] //= self.group
        return codes, *encoded(scales, tuple(counts), signed=False)

    def _decoded(self, codes: Array, scales: Array, *coarse: Array) -> Array:
        """One device's part of the weight, or of one matrix of those that it is, float32."""
        if self.form.scales == "e8m0":
            wide = mx_scales(scales)
        else:
            wide = decoded(Blocks(scales, *coarse)) if coarse else scales.astype(jnp.float32)
        return unpacked(codes, wide, self.axis, self.form.book)


def not_drawn(key: Array, axes: Names, shape: tuple[int, ...]) -> Array:
    raise UserError(
        "weights in few bits are made of others, and not drawn: give the values of a runtime whose `weights` are wider"
    )
