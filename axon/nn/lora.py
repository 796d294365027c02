"""LoRA: low-rank adapters beside frozen weights (Hu et al., arXiv:2106.09685)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.axes import Names, base, einsum, strip_roles
from axon.axes.contraction import contract
from axon.axes.patterns import Contraction
from axon.checks import check_range
from axon.errors import UserError
from axon.nn.param import Param, ParamSpec, constant, fan_in
from axon.nn.weight_transform import LookUp, Operand, Weight, WeightTransform, beside
from axon.parallel.expert import LowRank, Matrix
from axon.path_patterns import Patterns

GROUPS = ("experts",)
"""Axes that count matrices: both factors have them."""


@dataclass(frozen=True)
class LoRA(WeightTransform):
    """W becomes W + scale · A·B: A of its inputs by `rank`, B of `rank` by its outputs, W frozen.

    The sum is formed only where a model is exported, saved for another, or its loss is over an adapted head. A is
    drawn with variance 1 / inputs, B is 0. Everything else in the model is frozen too, but for `others`.

    Args:
        paths: patterns of the weights, as `Group.paths`; of these the matrices. By default all of the layers but for
            routers.
        rank: of A·B. alpha: scale = alpha / rank, or alpha / √rank with `rank_stabilized` (Kalajdzievski,
            arXiv:2312.03732).
        others: patterns of the model's parameters that train beside the adapters, such as norms.
        base: the dtype in which W is stored; None for its own.
    """

    paths: Patterns | None = None
    rank: int = 8
    alpha: float = 16.0
    rank_stabilized: bool = False
    others: Patterns = ()
    base: Literal["float32", "bfloat16"] | None = None

    adapts: ClassVar[bool] = True

    def __post_init__(self):
        check_range(self, "[1, inf)", "rank")
        check_range(self, "(0, inf)", "alpha")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def operand(self, weight: Weight, declared: Param, spec: ParamSpec) -> Operand:
        sizes = dict(zip(spec.axes, spec.shape, strict=True))
        inputs = math.prod(sizes[name] for name in spec.inputs)
        outputs = math.prod(size for name, size in sizes.items() if name in _outputs(spec.own, spec.inputs))
        if self.rank > min(inputs, outputs):
            raise UserError(
                f"LoRA.rank is {self.rank}, and a weight of {' '.join(spec.own)} is {inputs} × {outputs}: lower it, or "
                "leave the weight out of LoRA.paths"
            )
        if self.base is not None:
            declared.set_value(jax.ShapeDtypeStruct(declared.get_value().shape, jnp.dtype(self.base)))
        return AdaptedWeight(weight, declared, spec.inputs, self.rank, self.scale)

    @property
    def text(self) -> str:
        return f"LoRA of rank {self.rank}, scale {self.scale:g}"


class AdaptedWeight(Operand):
    """`base`, and beside it the factors `a` (groups inputs rank) and `b` (groups rank outputs), times `scale`."""

    def __init__(self, weight: Weight, declared: Param, inputs: Names, rank: int, scale: float):
        self.base, self.scale = weight, scale
        groups = _groups(declared.axes, inputs)
        outputs = _outputs(declared.axes, inputs)
        drawn = fan_in(" ".join(inputs))
        self.a = beside(declared, (*groups, *inputs, "rank"), drawn, jnp.float32, sizes={"rank": rank})
        self.b = beside(
            declared, (*groups, "rank", *outputs), constant(0.0), jnp.float32, sizes={"rank": rank}, decay=True
        )

    @property
    def axes(self) -> Names:
        return self.base.axes

    def contract(self, contraction: Contraction, x: Array) -> Array:
        """`x·W + scale · (x·A)·B`; where a contraction sums over outputs of W, B comes first."""
        y = einsum(contraction.text, x, self.base)
        return y + self.scale * self._low(contraction, x)

    def grouped(self, bias: Any) -> Matrix:
        low = LowRank(self.a.get_value(), self.b.get_value(), self.scale)
        if isinstance(self.base, Operand):
            return replace(self.base.grouped(bias), low=low)
        return Matrix(axes.stored_array(self.base, "experts"), bias=bias, low=low)

    def looked_up(self, ids: Array, look_up: LookUp) -> Array:
        rows, table = "batch seq.residual", self.axes[1]
        low = einsum(f"{rows} rank, rank {table} -> {rows} {table}", look_up(self.a, ids), self.b)
        return look_up(self.base, ids) + self.scale * low

    def whole(self) -> Array:
        full = self.base.whole() if isinstance(self.base, Operand) else axes.gathered(self.base)
        a, b = axes.gathered(self.a), axes.gathered(self.b)
        return full + self.scale * einsum(_product(self.a.axes, self.b.axes, self.axes), a, b)

    def derived(self, value: Array) -> dict[str, Array]:
        if isinstance(self.base, Operand):
            return {f"base/{name}": part for name, part in self.base.derived(value).items()}
        return {"base": value.astype(self.base.get_value().dtype)}

    def merged(self, values: Mapping[str, Array]) -> Array:
        own = {path.removeprefix("base/"): value for path, value in values.items() if path.startswith("base")}
        full = self.base.merged(own) if isinstance(self.base, Operand) else own["base"]
        stack = tuple(f"stack{i}" for i in range(full.ndim - len(self.axes)))
        a, b, out = ((*stack, *names) for names in (self.a.axes, self.b.axes, self.axes))
        return full.astype(jnp.float32) + self.scale * contract(values["a"], a, values["b"], b, out)

    def _own(self, names: Names, narrow: Array) -> Array:
        """The products with the first factor, of these axes, that the second factor is multiplied with."""
        return narrow

    def _low(self, contraction: Contraction, x: Array) -> Array:
        """`(x·A)·B`, in the order in which the contraction sums."""
        called = dict(zip(self.axes, contraction.right, strict=True)) | {"rank": "rank"}
        summed = set(strip_roles(contraction.left)) - set(strip_roles(contraction.out))
        of_a, of_b = (tuple(called[name] for name in factor.axes) for factor in (self.a, self.b))
        inputs = set(strip_roles(self.a.axes)) - set(GROUPS)
        first, last = (of_a, self.a), (of_b, self.b)
        if not summed & inputs:
            first, last = last, first
        names, factor = first
        here = set(strip_roles(names)) - set(GROUPS)
        kept = tuple(name for name in contraction.left if base(name) not in summed & here)
        new = tuple(name for name in names if base(name) not in (*strip_roles(contraction.left), "rank"))
        middle = (*kept, *new, "rank")
        narrow = self._own(middle, einsum(_product(contraction.left, names, middle), x, factor))
        names, factor = last
        return einsum(_product(middle, names, contraction.out), narrow, factor)


def _groups(axes: Names, inputs: Names) -> Names:
    """The axes along which a weight is several matrices; none of a router's, whose outputs the experts are."""
    groups = tuple(name for name in axes if base(name) in GROUPS)
    return groups if set(axes) - {*groups, *inputs} else ()


def _outputs(axes: Names, inputs: Names) -> Names:
    return tuple(name for name in axes if name not in (*_groups(axes, inputs), *inputs))


def _product(left: Names, right: Names, out: Names) -> str:
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(out)}"
