"""Weights in 8 bits: the matrices of blocks as int8 or fp8 values, with a scale for each output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from axon.axes import Names, base, einsum, strip_roles
from axon.axes.patterns import Contraction
from axon.errors import UserError
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.quantized_matmul.quantize import rounded, scale_of
from axon.nn.param import Param, ParamSpec
from axon.nn.weight_transform import Operand, Weight, WeightTransform, beside, untransformed
from axon.parallel.expert import Matrix
from axon.path_patterns import Patterns

SCALE_DTYPE = jnp.bfloat16
"""Of scales: those of no more than its bits are exact in every compute dtype."""


@dataclass(frozen=True)
class EightBit(WeightTransform):
    """Matrices in 8 bits: a `QuantizedWeight` each. By default embedding and head stay, and routers."""

    dtype: Any
    paths: Patterns | None = None

    def operand(self, weight: Weight, declared: Param, spec: ParamSpec) -> Operand:
        return QuantizedWeight(untransformed(weight, declared, self), spec, self.dtype)

    @property
    def text(self) -> str:
        return jnp.dtype(self.dtype).name


class QuantizedWeight(Operand):
    """A matrix W = values · scales: 8-bit `values` with W's axes, and `scales` with those that are its outputs.

    `x · W` is a product of `x`, in the compute dtype, with the values, which are converted as they are read, and the
    scales multiply what comes out. Activations are not rounded: what reads weights is bound by their bytes, and of
    activations a few are so large that 8 bits hurt (Dettmers et al., arXiv:2208.07339).

    Args:
        weight: the parameter that it is to stand for. spec: of it; there is a scale for each place along the axes that
            are not its inputs. dtype: of the values, int8 or float8_e4m3fn.
    """

    def __init__(self, weight: Param, spec: ParamSpec, dtype: Any):
        self.dtype = jnp.dtype(dtype)
        self.summed = tuple(i for i, name in enumerate(spec.axes) if i >= spec.stack and name in spec.inputs)
        outputs = tuple(name for name in weight.axes if name not in spec.inputs)
        untrained = {"trained": False}
        self.values = beside(weight, weight.axes, _not_drawn, dtype, decay=True, in_stack=weight.in_stack, **untrained)
        self.scales = beside(weight, outputs, _not_drawn, SCALE_DTYPE, decay=False, **untrained)

    @property
    def axes(self) -> Names:
        return self.values.axes

    def contract(self, contraction: Contraction, x: Array) -> Array:
        """See `axon.axes.CompositeWeight`. Where a contraction sums over outputs of W, `x` is scaled before it."""
        called = dict(zip(strip_roles(contraction.right), contraction.right, strict=True))
        scales = tuple(called[base(name)] for name in self.scales.axes)
        plain = set(strip_roles(scales))
        if plain <= set(strip_roles(contraction.out)):
            return self._scaled(contraction.out, scales, einsum(contraction.text, x, self.values))
        if plain <= set(strip_roles(contraction.left)):
            return einsum(contraction.text, self._scaled(contraction.left, scales, x), self.values)
        kept = tuple(name for name in scales if base(name) not in strip_roles(contraction.out))
        out = (*kept, *contraction.out)  # each of those that are summed has its own scales
        operands = f"{' '.join(contraction.left)}, {' '.join(contraction.right)}"
        y = self._scaled(out, scales, einsum(f"{operands} -> {' '.join(out)}", x, self.values))
        return jnp.sum(y, axis=tuple(range(len(kept))))

    def grouped(self, bias: Any) -> Matrix:
        return Matrix(self.values.get_value(), self.scales.get_value(), bias)

    def derived(self, value: Array) -> dict[str, Array]:
        return quantized(value, self.summed, self.dtype)

    def merged(self, values: Mapping[str, Array]) -> Array:
        return values["values"].astype(jnp.float32) * jnp.expand_dims(values["scales"], self.summed)

    def _scaled(self, names: Names, scales: Names, x: Array) -> Array:
        of_x = " ".join(names)
        return einsum(f"{of_x}, {' '.join(scales)} -> {of_x}", x, self.scales)


def is_quantized(dtype: Any) -> bool:
    """Whether weights of this dtype have scales; not of None."""
    return dtype is not None and jnp.dtype(dtype) in map(jnp.dtype, EIGHT_BITS)


def quantized(value: Array, over: tuple[int, ...], dtype: Any) -> dict[str, Array]:
    """The `values` and `scales` of a `QuantizedWeight` for an array with the dimensions `over` summed."""
    wide = value.astype(jnp.float32)
    exact = scale_of(jnp.max(jnp.abs(wide), axis=over, keepdims=True), dtype)
    scales = (exact * (1 + 2**-8)).astype(SCALE_DTYPE)  # at least the exact one: rounding takes off 2⁻⁹ at most
    values = rounded(wide / scales.astype(jnp.float32), dtype)
    return {"values": values, "scales": jnp.squeeze(scales, over)}


def _not_drawn(key: Array, axes: Names, shape: tuple[int, ...]) -> Array:
    raise UserError(
        "weights in 8 bits are made of others, and not drawn: give the values of a runtime whose `weights` are wider"
    )
