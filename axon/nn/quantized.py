"""Weights in 8 bits: the matrices of blocks as int8 or fp8 values, with a scale for each output."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from axon.axes import Names, base, einsum, strip_roles
from axon.axes.patterns import Contraction
from axon.errors import UserError
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.quantized_matmul.quantize import rounded, scale_of
from axon.nn.param import Param, ParamSpec, parameters
from axon.nn.router import Router
from axon.parallel.expert import Matrix

SCALE_DTYPE = jnp.bfloat16
"""Of scales: those of no more than its bits are exact in every compute dtype."""


class QuantizedWeight(nnx.Module):
    """A matrix W = values · scales: 8-bit `values` with W's axes, and `scales` with those that are its outputs.

    `x · W` is a product of `x`, in the compute dtype, with the values, which are converted as they are read, and the
    scales multiply what comes out. Activations are not rounded: what reads weights is bound by their bytes, and of
    activations a few are so large that 8 bits hurt (Dettmers et al., arXiv:2208.07339).

    Args:
        weight: the parameter that it is to stand for. inputs: those of its axes that a contraction sums over; it has a
            scale for each place along the others. dtype: of the values, int8 or float8_e4m3fn.
    """

    def __init__(self, weight: Param, inputs: Names, dtype: Any):
        self.values = _like(weight, weight.axes, dtype, decay=True, in_stack=weight.in_stack)
        self.scales = _like(weight, tuple(name for name in weight.axes if name not in inputs), SCALE_DTYPE, decay=False)

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
        """See `axon.axes.GroupedWeight`."""
        return Matrix(self.values.get_value(), self.scales.get_value(), bias)

    def _scaled(self, names: Names, scales: Names, x: Array) -> Array:
        of_x = " ".join(names)
        return einsum(f"{of_x}, {' '.join(scales)} -> {of_x}", x, self.scales)


def is_quantized(dtype: Any) -> bool:
    """Whether weights of this dtype have scales; not of None."""
    return dtype is not None and jnp.dtype(dtype) in map(jnp.dtype, EIGHT_BITS)


def quantize_blocks(module: nnx.Module, dtype: Any) -> dict[str, ParamSpec]:
    """Put a `QuantizedWeight` in place of each matrix of the blocks of `module`. Returns: path → what was declared.

    Routers stay, as their choice turns on small differences; so do norms and biases, and what is outside of the
    blocks, embedding and head.
    """
    owners = {"/".join(map(str, path)): owner for path, owner in nnx.iter_modules(module)}
    found = {}
    for path, spec in parameters(module).items():
        where, _, name = path.rpartition("/")
        owner = owners[where]
        if spec.stack > 0 and len(spec.own) > 1 and spec.decay and not isinstance(owner, Router):
            found[path] = spec
            setattr(owner, name, QuantizedWeight(getattr(owner, name), spec.inputs, dtype))
    return found


def quantized(value: Array, spec: ParamSpec, dtype: Any) -> dict[str, Array]:
    """The `values` and `scales` of a `QuantizedWeight` for an array that `spec` declares."""
    over = tuple(i for i, name in enumerate(spec.axes) if i >= spec.stack and name in spec.inputs)
    wide = value.astype(jnp.float32)
    exact = scale_of(jnp.max(jnp.abs(wide), axis=over, keepdims=True), dtype)
    scales = (exact * (1 + 2**-8)).astype(SCALE_DTYPE)  # at least the exact one: rounding takes off 2⁻⁹ at most
    values = rounded(wide / scales.astype(jnp.float32), dtype)
    return {"values": values, "scales": jnp.squeeze(scales, over)}


def _like(weight: Param, axes: Names, dtype: Any, *, decay: bool, in_stack: bool = False) -> Param:
    """A parameter with some of a weight's axes, stacked as it is."""
    stacked, stack = tuple(weight.get_value().shape), len(weight.stack)
    sizes = dict(zip(map(base, weight.axes), stacked[stack:], strict=True))
    param = Param(" ".join(axes), sizes, _not_drawn, decay=decay, dtype=dtype, in_stack=in_stack)
    shape = (*stacked[:stack], *param.get_value().shape)
    param.set_value(jax.ShapeDtypeStruct(shape, dtype))
    param.set_metadata(stack=weight.stack, layers=weight.layers)
    return param


def _not_drawn(key: Array, axes: Names, shape: tuple[int, ...]) -> Array:
    raise UserError(
        "weights in 8 bits are made of others, and not drawn: give the values of a runtime whose `weights` are wider"
    )
