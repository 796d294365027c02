"""Transfers of one equation of a traced program over the mesh, by the shardings in its types."""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from axon.plan.moves import ArraySharding, Move, moves, sent

MANUAL = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""Primitives of a manual region → kinds of collective."""

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin")


def sends(equation: core.JaxprEqn) -> tuple[list[Move], list[str]]:
    """The collectives of one equation without bodies, and what is unclear about it."""
    name, mesh = equation.primitive.name, mesh_of(equation)
    if mesh is None:
        return [], []
    if name in MANUAL:
        return _manual(equation, mesh), []
    out, given = equation.outvars[0], equation.invars
    after = sharding_of(out)
    if name == "reshard":
        return moves(size_of(given[0]), sharding_of(given[0]), after, mesh), []
    if name == "dot_general":
        return moves(size_of(out), _product(equation), after, mesh), []
    if name in REDUCTIONS:
        return moves(size_of(out), _reduced(sharding_of(given[0]), equation.params["axes"]), after, mesh), []
    lost = {axis for v in given for axis in sharding_of(v).axes} - {
        axis for v in equation.outvars for axis in sharding_of(v).axes
    }
    return [], [f"{name} of an array split over {', '.join(sorted(lost))}: the compiler decides"] if lost else []


def _manual(equation: core.JaxprEqn, mesh: dict[str, int]) -> list[Move]:
    kind, params = MANUAL[equation.primitive.name], equation.params
    named = params["axes"] if "axes" in params else params["axis_name"]
    axes = tuple(a for a in ((named,) if isinstance(named, str) else named) if mesh.get(a, 1) > 1)
    groups = params.get("axis_index_groups")
    num_shards = len(groups[0]) if groups else math.prod(mesh[a] for a in axes)
    whole = equation.outvars if kind == "all-gather" else equation.invars
    size = sum(size_of(v) / math.prod(mesh[a] for a in sharding_of(v).axes) for v in whole)
    return [Move(kind, axes, sent(kind, size, num_shards))] if num_shards > 1 else []


def _product(equation: core.JaxprEqn) -> ArraySharding:
    """The sharding of a matrix product's result before anything is sent."""
    (contracted, batched) = equation.params["dimension_numbers"]
    operands = [sharding_of(v) for v in equation.invars[:2]]
    removed = [set(c) | set(b) for c, b in zip(contracted, batched, strict=True)]
    free = [
        axes
        for operand, dimensions in zip(operands, removed, strict=True)
        for i, axes in enumerate(operand.split)
        if i not in dimensions
    ]
    batch = [operands[0].split[i] for i in batched[0]]
    unreduced = {a for operand, dims in zip(operands, contracted, strict=True) for i in dims for a in operand.split[i]}
    return ArraySharding((*batch, *free), frozenset(unreduced).union(*(operand.unreduced for operand in operands)))


def _reduced(operand: ArraySharding, dimensions: Sequence[int]) -> ArraySharding:
    split = tuple(axes for i, axes in enumerate(operand.split) if i not in dimensions)
    return ArraySharding(split, operand.unreduced | {a for i in dimensions for a in operand.split[i]})


def num_shards(equation: core.JaxprEqn) -> int:
    """Over how many devices an equation's work is split."""
    mesh = mesh_of(equation) or {}
    return math.prod(mesh[a] for a in {a for v in equation.invars for a in sharding_of(v).axes})


def mesh_of(equation: core.JaxprEqn) -> dict[str, int] | None:
    """Mesh axis → size, from an operand's type."""
    for variable in (*equation.outvars, *equation.invars):
        sharding = _sharding(variable)
        if sharding is not None and not sharding.mesh.empty:
            return dict(sharding.mesh.shape)
    return None


def _sharding(variable: Any) -> Any:
    return getattr(variable.aval, "sharding", None)


def sharding_of(variable: Any) -> ArraySharding:
    sharding = _sharding(variable)
    return ArraySharding(()) if sharding is None else ArraySharding.of(sharding.spec, variable.aval.ndim)


def is_unreduced(variable: Any) -> bool:
    """Whether a variable's true value is a sum over devices that is still to be made."""
    return bool(sharding_of(variable).unreduced)


def size_of(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize
