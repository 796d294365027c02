"""A weight with a product of low rank beside it, W + scale · A·B."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Names, base, einsum, strip_roles
from axon.axes.contraction import contract
from axon.axes.patterns import Contraction
from axon.nn.param import Initializer, Param, constant, fan_in
from axon.nn.pissa import Principal, of_source
from axon.nn.weight_transform import LookUp, Operand, Weight, beside
from axon.parallel.expert import LowRank, Matrix

GROUPS = ("experts",)
"""Axes that count matrices: both factors have them."""


class AdaptedWeight(Operand):
    """`base`, and beside it the factors `a` (groups inputs rank) and `b` (groups rank outputs), times `scale`.

    Where they are `principal`, they are made of the weight, and the base is what remains of it.
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
        self.base, self.inputs, self.rank, self.scale, self.principal = weight, inputs, rank, scale, principal
        drawn = (of_source if principal else fan_in)(" ".join(inputs))
        self.a, self.b = factors_beside(declared, inputs, rank, drawn)

    @property
    def axes(self) -> Names:
        return self.base.axes

    def contract(self, contraction: Contraction, x: Array) -> Array:
        """`x·W + scale · (x·A)·B`; where a contraction sums over outputs of W, B comes first."""
        y = einsum(contraction.text, x, self.base)
        return y + self.scale * low_rank_product(self.axes, self.a, self.b, contraction, x, self._own)

    def grouped(self, bias: Any) -> Matrix:
        return grouped_beside(self.base, bias, [(self.a, self.b)], self.scale)

    def looked_up(self, ids: Array, look_up: LookUp) -> Array:
        rows, table = ("batch", "seq.residual"), self.axes[1]
        narrow = self._own((*rows, "rank"), look_up(self.a, ids))
        low = einsum(product_pattern((*rows, "rank"), ("rank", table), (*rows, table)), narrow, self.b)
        return look_up(self.base, ids) + self.scale * low

    def whole(self) -> Array:
        full = self.base.whole() if isinstance(self.base, Operand) else axes.gathered(self.base)
        a, b = axes.gathered(self.a), axes.gathered(self.b)
        return full + self.scale * einsum(product_pattern(self.a.axes, self.b.axes, self.axes), a, b)

    def derived(self, value: Array) -> dict[str, Array]:
        if self.principal is None:
            return derived_base(self.base, value)
        residual, a, b = self._split(value.astype(jnp.float32), self.principal)
        return derived_base(self.base, residual) | {"a": a, "b": b}

    def _split(self, value: Array, principal: Principal) -> tuple[Array, Array, Array]:
        """What remains of the weight without scale · A·B, and A and B: layer by layer, each whole on every device."""
        scope = axes.current()
        own = scope.placement.spec(self.axes, "params") if scope else (None,) * len(self.axes)
        order = *groups_of(self.axes, self.inputs), *self.inputs, *outputs_of(self.axes, self.inputs)
        count = len(groups_of(self.axes, self.inputs))
        sides = count, count + len(self.inputs)

        def split(weight: Array) -> tuple[Array, Array, Array]:
            whole = lax.transpose(axes.reshard(weight, PartitionSpec()), [self.axes.index(name) for name in order])
            groups, inputs, outputs = (whole.shape[i:j] for i, j in zip((0, *sides), (*sides, None), strict=True))
            matrix = whole.reshape(*groups, math.prod(inputs), math.prod(outputs)) / self.scale
            factors = axes.per_device(
                lambda one: principal(one, self.rank), (PartitionSpec(),), (PartitionSpec(), PartitionSpec())
            )
            a, b = factors(matrix)
            a, b = a.reshape(*groups, *inputs, self.rank), b.reshape(*groups, self.rank, *outputs)
            low = self.scale * contract(a, self.a.axes, b, self.b.axes, self.axes)
            return weight - axes.reshard(low, PartitionSpec(*own)), a, b

        stack, each = value.ndim - len(self.axes), split
        for _ in range(stack):
            each = partial(lax.map, each)
        return each(axes.reshard(value, PartitionSpec(*(None,) * stack, *own)))

    def merged(self, values: Mapping[str, Array]) -> Array:
        full = self._merged_base(values)
        stack = tuple(f"stack{i}" for i in range(full.ndim - len(self.axes)))
        a, b, out = ((*stack, *names) for names in (self.a.axes, self.b.axes, self.axes))
        return full + self.scale * contract(values["a"], a, values["b"], b, out)

    def _merged_base(self, values: Mapping[str, Array]) -> Array:
        """The base in float32, of what `values` have of it."""
        own = {path.removeprefix("base/"): value for path, value in values.items() if path.startswith("base")}
        return (self.base.merged(own) if isinstance(self.base, Operand) else own["base"]).astype(jnp.float32)

    def _own(self, names: Names, narrow: Array) -> Array:
        """The products with the first factor, of these axes, that the second factor is multiplied with."""
        return narrow


def factors_beside(declared: Param, inputs: Names, rank: int, drawn: Initializer) -> tuple[Param, Param]:
    """A, groups inputs `rank`, with the initial values `drawn`, and B, groups `rank` outputs, 0 at first; float32."""
    groups, outputs, sizes = groups_of(declared.axes, inputs), outputs_of(declared.axes, inputs), {"rank": rank}
    a = beside(declared, (*groups, *inputs, "rank"), drawn, jnp.float32, sizes=sizes)
    return a, beside(declared, (*groups, "rank", *outputs), constant(0.0), jnp.float32, sizes=sizes, decay=True)


def grouped_beside(weight: Weight, bias: Any, factors: Sequence[tuple[Param, Param]], scale: float) -> Matrix:
    """The matrices of experts that are the `base` of an operand, with products of low rank beside each."""
    low = tuple(LowRank(a.get_value(), b.get_value(), scale) for a, b in factors)
    if isinstance(weight, Operand):
        return replace(weight.grouped(bias), low=low)
    return Matrix(axes.stored_array(weight, "experts"), bias=bias, low=low)


def derived_base(weight: Weight, value: Array) -> dict[str, Array]:
    """What follows from the value of a weight that is the `base` of an operand, by path in that."""
    if isinstance(weight, Operand):
        return {f"base/{name}": part for name, part in weight.derived(value).items()}
    return {"base": value.astype(weight.get_value().dtype)}


def low_rank_product(
    axes: Names, a: Param, b: Param, contraction: Contraction, x: Array, own: Callable[[Names, Array], Array]
) -> Array:
    """`(x·A)·B`, in the order in which the contraction with a weight of these `axes` sums. `own(names, narrow)`: what
    of the products with the first factor, of the axes `names`, is multiplied with the second."""
    called = dict(zip(axes, contraction.right, strict=True)) | {"rank": "rank"}
    summed = set(strip_roles(contraction.left)) - set(strip_roles(contraction.out))
    of_a, of_b = (tuple(called[name] for name in factor.axes) for factor in (a, b))
    inputs = set(strip_roles(a.axes)) - set(GROUPS)
    first, last = (of_a, a), (of_b, b)
    if not summed & inputs:
        first, last = last, first
    names, factor = first
    here = set(strip_roles(names)) - set(GROUPS)
    kept = tuple(name for name in contraction.left if base(name) not in summed & here)
    new = tuple(name for name in names if base(name) not in (*strip_roles(contraction.left), "rank"))
    middle = (*kept, *new, "rank")
    narrow = own(middle, einsum(product_pattern(contraction.left, names, middle), x, factor))
    names, factor = last
    return einsum(product_pattern(middle, names, contraction.out), narrow, factor)


def groups_of(axes: Names, inputs: Names) -> Names:
    """The axes along which a weight is several matrices; none of a router's, whose outputs the experts are."""
    groups = tuple(name for name in axes if base(name) in GROUPS)
    return groups if set(axes) - {*groups, *inputs} else ()


def outputs_of(axes: Names, inputs: Names) -> Names:
    """The axes of a weight that are neither its inputs nor count matrices."""
    return tuple(name for name in axes if name not in (*groups_of(axes, inputs), *inputs))


def product_pattern(left: Names, right: Names, out: Names) -> str:
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(out)}"
