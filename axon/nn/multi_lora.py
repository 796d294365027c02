"""Many LoRA adapters beside one base, each position of a batch with its own: for serving."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.axes import Names, base, einsum, shard, strip_roles
from axon.axes.contraction import broadcast_to_axes
from axon.axes.patterns import Contraction
from axon.errors import UserError
from axon.nn.adapted_weight import GROUPS, AdaptedWeight
from axon.nn.param import Param, ParamSpec
from axon.nn.quantized import quantized_format
from axon.nn.weight_transform import LookUp, Operand, Weight, WeightTransform
from axon.parallel.expert import Matrix
from axon.path_patterns import Patterns

POSITION = "batch", "seq", "rank"
"""The axes of `axon.axes.own_ranks`."""


@dataclass(frozen=True)
class MultiLoRA(WeightTransform):
    """W becomes W + A·B, of whose `rank` columns of A and rows of B an adapter of rank r has any r.

    A position is multiplied with its own adapter's alone (`axon.axes.own_ranks`), which is one product for all adapters
    of a batch, on every layout.

    Args:
        rank: of all adapters together. dtype: of both factors, and of W unless another transform has made it.
        paths: as of `LoRA`, but that experts' matrices are not among those by default.
    """

    rank: int
    dtype: Any
    paths: Patterns | None = None

    def fits(self, path: str, spec: ParamSpec) -> bool:
        return super().fits(path, spec) and not (self.paths is None and set(GROUPS) & set(spec.own))

    def operand(self, weight: Weight, declared: Param, spec: ParamSpec) -> Operand:
        if weight is declared:
            declared.set_value(jax.ShapeDtypeStruct(declared.get_value().shape, jnp.dtype(self.dtype)))
        return MultiAdaptedWeight(weight, declared, spec.inputs, self.rank, self.dtype)

    @property
    def text(self) -> str:
        return f"room for adapters of rank {self.rank} in all"


class MultiAdaptedWeight(AdaptedWeight):
    """`base`, and beside it the factors `a` and `b` of all adapters, `b` times their scales."""

    def __init__(self, weight: Weight, declared: Param, inputs: Names, rank: int, dtype: Any):
        super().__init__(weight, declared, inputs, rank, scale=1.0)
        for factor in (self.a, self.b):
            factor.set_value(jax.ShapeDtypeStruct(factor.get_value().shape, jnp.dtype(dtype)))

    def contract(self, contraction: Contraction, x: Array) -> Array:
        """The base's own contraction, where no position has an adapter."""
        if _own_ranks() is None:
            return einsum(contraction.text, x, self.base)
        return super().contract(contraction, x)

    def grouped(self, bias: Any) -> Matrix:
        found = super().grouped(bias)
        return replace(found, low=()) if _own_ranks() is None else found

    def looked_up(self, ids: Array, look_up: LookUp) -> Array:
        return look_up(self.base, ids) if _own_ranks() is None else super().looked_up(ids, look_up)

    def whole(self) -> Array:
        """Refused: there is one for each adapter."""
        raise self._unusable("multiplied as a whole, for all adapters at once")

    def _own(self, names: Names, narrow: Array) -> Array:
        where = tuple(name for name in names if base(name) in POSITION)
        if strip_roles(where) != POSITION:
            raise UserError(
                f"a weight of {' '.join(self.axes)} is multiplied with what has the axes {' '.join(names)}, and an "
                "adapter belongs to a position of `batch seq`: merge the adapter into the model instead"
            )
        own = shard(_own_ranks(), " ".join(where))
        return jnp.where(broadcast_to_axes(own, POSITION, strip_roles(names)), narrow, 0)


class Room(NamedTuple):
    """Room for adapters beside a model: the `rank` of all together; `paths` as of `MultiLoRA`."""

    rank: int = 0
    paths: Patterns | None = None


def room_for(room: Room, weights: Any, compute: Any) -> tuple[MultiLoRA, ...]:
    """The transform that gives adapters their room; none for rank 0. `weights`: the dtype in which a runtime stores its
    parameters, see `axon.runtime.Runtime`; compute: that of its arithmetic."""
    return (MultiLoRA(room.rank, compute if quantized_format(weights) else weights, room.paths),) * bool(room.rank)


def _own_ranks() -> Any:
    scope = axes.current()
    return None if scope is None else scope.own_ranks
