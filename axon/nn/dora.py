"""DoRA: the directions of a weight are adapted by a product of low rank, and their magnitudes on their own (Liu et al.,
arXiv:2402.09353)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from axon import axes
from axon.axes import Names, einsum
from axon.axes.patterns import Contraction
from axon.nn.adapted_weight import AdaptedWeight, groups_of, outputs_of, product_pattern
from axon.nn.output_scales import scaled, scaled_product
from axon.nn.param import Initializer, Param
from axon.nn.pissa import Principal
from axon.nn.weight_transform import LookUp, Weight, beside
from axon.parallel.expert import Matrix


class DecomposedWeight(AdaptedWeight):
    """`magnitude` · V / ‖V‖, where V = W + scale · A·B, ‖V‖ is over its inputs, and both are of each output.

    ‖V‖ is a constant in the backward, as in the paper (section 4.3). Its square is made of `norm`, that of W, which is
    stored, and of W's products with A, so that no copy of V is: ‖V‖² = ‖W‖² + scale · B·(2·Wᵀ·A + scale · AᵀA·B). An
    output whose weights are all 0 stays 0.

    `magnitude` and `norm` (groups outputs, float32) begin as ‖W‖.
    """

    def __init__(
        self,
        weight: Weight,
        declared: Param,
        inputs: Names,
        rank: int,
        scale: float,
        principal: Principal | None = None,
    ):
        super().__init__(weight, declared, inputs, rank, scale, principal)
        names = (*groups_of(declared.axes, inputs), *outputs_of(declared.axes, inputs))
        value = declared.get_value()
        drawn = _NormOf(declared.init, declared.axes, value.shape[len(declared.stack) :], value.dtype, inputs)
        self.magnitude = beside(declared, names, drawn, jnp.float32, decay=False)
        self.norm = beside(declared, names, drawn, jnp.float32, decay=False, trained=False)

    def drawn_as(self, path: str) -> list[tuple[Param, str]]:
        return [(self.magnitude, path), (self.norm, path)]

    def contract(self, contraction: Contraction, x: Array) -> Array:
        return scaled_product(contraction, x, self._scales(), super().contract)

    def grouped(self, bias: Any) -> Matrix:
        return replace(super().grouped(bias), factors=self._scales().value)

    def looked_up(self, ids: Array, look_up: LookUp) -> Array:
        table = self.magnitude.axes
        return scaled(("batch", "seq.residual", *table), table, super().looked_up(ids, look_up), self._scales())

    def whole(self) -> Array:
        return scaled(self.axes, self.magnitude.axes, super().whole(), self._scales())

    def derived(self, value: Array) -> dict[str, Array]:
        parts = super().derived(value)
        norm = self._norm(self._merged_base(parts))
        magnitude = norm if self.principal is None else self._norm(super().merged(parts))
        return parts | {"magnitude": magnitude, "norm": norm}

    def merged(self, values: Mapping[str, Array]) -> Array:
        full = super().merged(values)
        scales = values["magnitude"] * _inverse(self._norm(full))
        return full * jnp.expand_dims(scales, _places(self.axes, self.inputs))

    def _norm(self, value: Array) -> Array:
        """‖V‖ of the stack of all layers."""
        return _norm(value, _places(self.axes, self.inputs))

    def _scales(self) -> "_Scales":
        """magnitude / ‖V‖, float32, of which `magnitude` has a gradient."""
        names = " ".join(self.magnitude.axes)
        cross = einsum(product_pattern(self.a.axes, self.axes, self.b.axes), self._constant(self.a), self.base)
        with axes.exact():
            inverse = _inverse(jnp.sqrt(jnp.maximum(self._squared_norm(cross), 0)))
            return _Scales(self.magnitude.axes, einsum(f"{names}, {names} -> {names}", inverse, self.magnitude))

    def _squared_norm(self, cross: Array) -> Array:
        """‖V‖², of Wᵀ·A."""
        a, b, norm = map(self._constant, (self.a, self.b, self.norm))
        twice = *groups_of(self.axes, self.inputs), "_rank", "rank"
        inner, outer = (tuple("_rank" if name == "rank" else name for name in one.axes) for one in (self.a, self.b))
        gram = einsum(product_pattern(inner, self.a.axes, twice), a, a)
        low = einsum(product_pattern(twice, outer, self.b.axes), gram, b)
        change = 2 * cross.astype(jnp.float32) + self.scale * low
        return norm**2 + self.scale * einsum(product_pattern(self.b.axes, self.b.axes, self.norm.axes), b, change)

    def _constant(self, factor: Param) -> Array:
        return lax.stop_gradient(axes.gathered(factor))


@dataclass
class _Scales:
    """An `axon.axes.Weight` that is computed."""

    axes: Names
    value: Array

    def get_value(self) -> Array:
        return self.value


@dataclass(frozen=True)
class _NormOf:
    """Initial values: the norm over its inputs of the weight that `init` draws with the same key."""

    init: Initializer
    axes: Names
    shape: tuple[int, ...]
    dtype: Any
    inputs: Names

    def __call__(self, key: Array, axes: Names, shape: tuple[int, ...]) -> Array:
        value = self.init(key, self.axes, self.shape).astype(self.dtype)
        return _norm(value, _places(self.axes, self.inputs))


def _places(axes: Names, inputs: Names) -> tuple[int, ...]:
    """The dimensions of a weight that are its inputs, counted from the last."""
    return tuple(i - len(axes) for i, name in enumerate(axes) if name in inputs)


def _norm(value: Array, over: tuple[int, ...]) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(value.astype(jnp.float32)), axis=over))


def _inverse(norm: Array) -> Array:
    """1 / norm; 0 for 0, as of a layer that is padding."""
    return jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)
