"""Weights in 4 bits: codes for blocks of inputs, decoded where they are multiplied."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Names, decoding_einsum
from axon.axes.patterns import Contraction
from axon.errors import UserError
from axon.nn.param import Param, ParamSpec
from axon.nn.weight_transform import Operand, beside
from axon.precision.codebook import Codebook, packed, unpacked
from axon.precision.dynamic_code import Blocks, decoded, encoded

GROUP = 256
"""How many scales share one of their own, of neighbouring outputs; all, of fewer."""


@dataclass(frozen=True)
class FourBits:
    """A format of 4 bits.

    Args:
        book: what the codes stand for. block: how many neighbours along the last input share a scale; all, if it has
            fewer. double: whether scales are kept in 8 bits themselves; else they are bfloat16.
    """

    book: Codebook
    block: int
    double: bool = False


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
        self.block, self.group = min(form.block, sizes[along]), min(GROUP, sizes[across])
        for name, length in ((along, self.block), (along, 2), (across, self.group if form.double else 1)):
            if sizes[name] % length:
                raise UserError(
                    f"blocks of {length} do not divide the axis {name!r} of {sizes[name]} of a weight of "
                    f"{' '.join(weight.axes)}: leave it out of Quantize.paths"
                )
        blocks = {along: sizes[along] // self.block}
        options = {"trained": False, "decay": False}
        self.codes = beside(weight, weight.axes, not_drawn, jnp.uint8, sizes={along: sizes[along] // 2}, **options)
        kept = jnp.uint8 if form.double else jnp.bfloat16
        self.scales = beside(weight, weight.axes, not_drawn, kept, sizes=blocks, **options)
        if form.double:
            groups = blocks | {across: sizes[across] // self.group}
            self.coarse = beside(weight, weight.axes, not_drawn, jnp.float32, sizes=groups, **options)
        self.across = outputs[-1] - len(weight.axes)

    @property
    def axes(self) -> Names:
        return self.codes.axes

    def contract(self, contraction: Contraction, x: Array) -> Array:
        parts = [vars(self)[name].get_value() for name in self._names[1:]]
        return decoding_einsum(contraction, x, self.codes, self._decoded, parts)

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
        return ("codes", "scales", "coarse") if self.form.double else ("codes", "scales")

    @property
    def _spec(self) -> PartitionSpec:
        scope = axes.current()
        names = (*self.codes.stack, *self.axes)
        return scope.placement.spec(names, "params") if scope else PartitionSpec()

    def _encoded(self, value: Array) -> tuple[Array, ...]:
        """The parts for one device's part of the weight."""
        codes, scales = packed(value, self.axis, self.block, self.form.book)
        if not self.form.double:
            return codes, scales.astype(jnp.bfloat16)
        counts = list(scales.shape)
        counts[self.across] //= self.group
        return codes, *encoded(scales, tuple(counts), signed=False)

    def _decoded(self, codes: Array, scales: Array, *coarse: Array) -> Array:
        """One device's part of the weight, float32."""
        wide = decoded(Blocks(scales, *coarse)) if coarse else scales.astype(jnp.float32)
        return unpacked(codes, wide, self.axis, self.form.book)


def not_drawn(key: Array, axes: Names, shape: tuple[int, ...]) -> Array:
    raise UserError(
        "weights in few bits are made of others, and not drawn: give the values of a runtime whose `weights` are wider"
    )
