"""The collectives of a traced step, read from its program: nothing is compiled, and no device is needed.

On Explicit mesh axes every collective is written in the program: a `reshard`, an operation whose result's type says
that its sum is done, or one of `lax`'s inside a `shard_map`. On Auto axes only the last are; the compiler adds more.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jax.extend import core

from axon.axes import Names
from axon.plan.moves import Held, Move, moves, sent
from axon.train.flops import bodies_of, count_equation

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

CARRIERS = ("reshard", "mesh_cast", "convert_element_type", "reshape", "transpose", "squeeze", "slice", "split", "copy")
"""Primitives whose result is their operand, placed or cut otherwise: a weight stays a weight."""


@dataclass(frozen=True)
class Transfer:
    """One collective of a step.

    Args:
        kind, mesh_axes, bytes: as of `Move`, each time. times: how often a step does it.
        source: what is moved: a label of the program's inputs, "gradients", or "" for what lies between.
        stack: the name stack of the operation, as `jvp(attention)/…`.
        beside: share of the FLOPs of the matrix products in the same loop body that neither make its operand nor
            need its result. The compiler may run these at the same time.
    """

    kind: str
    mesh_axes: Names
    bytes: float
    times: int
    source: str
    stack: str
    beside: float


@dataclass(frozen=True)
class Communication:
    """The transfers of a step in program order, and a line for each thing that could not be counted."""

    transfers: tuple[Transfer, ...]
    uncounted: tuple[str, ...]


def communication(jaxpr: core.Jaxpr, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> Communication:
    """Every collective of a program with shardings in its types.

    Args:
        inputs, outputs: a label for each of the program's arguments and results, "" for those of no interest.
            A collective of an argument, or one that makes a result, has its label as `source`.
    """
    walk = _Walk()
    body = _Body(1)
    made = walk.inline(jaxpr, [walk.fresh(label) for label in inputs or [""] * len(jaxpr.invars)], body, "")
    labels = {value.number: label for value, label in zip(made, outputs, strict=False) if label}
    walk.close(body, labels)
    return Communication(tuple(walk.transfers), tuple(dict.fromkeys(walk.uncounted)))


class _Value(NamedTuple):
    """What is known of a variable: a number that equal values share, its label, and the nodes it depends on."""

    number: int
    source: str
    needs: int = 0  # a set of node numbers of its body, as bits


@dataclass
class _Body:
    """A loop's body, or the program: its matrix products and collectives as nodes, and what each one needs."""

    times: int
    flops: list[float] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    found: list[tuple[int, int, Transfer]] = field(default_factory=list)  # node, number of the result, transfer

    def node(self, flops: float, needs: int) -> int:
        """The bit of a new node."""
        self.flops.append(flops)
        self.needs.append(needs)
        return 1 << len(self.flops) - 1

    def beside(self, node: int) -> float:
        """Share of all FLOPs in nodes that `node` does not need and that do not need it."""
        own = self.needs[node]
        free = sum(
            flops
            for i, flops in enumerate(self.flops)
            if flops and not own >> i & 1 and not self.needs[i] >> node & 1
        )
        return free / (sum(self.flops) or 1.0)


class _Walk:
    def __init__(self):
        self.transfers: list[Transfer] = []
        self.uncounted: list[str] = []
        self._numbers = itertools.count()
        self._made: dict[Any, list[_Value]] = {}

    def fresh(self, source: str = "", needs: int = 0) -> _Value:
        return _Value(next(self._numbers), source, needs)

    def close(self, body: _Body, labels: dict[int, str]) -> None:
        """Hand over what a body sends, now that all of it has been seen."""
        for node, number, transfer in body.found:
            source = transfer.source or labels.get(number, "")
            self.transfers.append(replace(transfer, source=source, beside=body.beside(node)))

    def inline(self, jaxpr: core.Jaxpr, values: Iterable[_Value], body: _Body, stack: str) -> list[_Value]:
        """Walk a jaxpr as a part of `body`; the values of its results."""
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, values, strict=True))

        def read(variable: Any) -> _Value:
            if isinstance(variable, core.Literal):
                return self.fresh()
            return known.setdefault(variable, self.fresh())

        for equation in jaxpr.eqns:
            where = f"{stack}/{equation.source_info.name_stack}"
            made = self._equation(equation, [read(v) for v in equation.invars], body, where)
            known.update(zip(equation.outvars, made, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, equation: core.JaxprEqn, values: list[_Value], body: _Body, stack: str) -> list[_Value]:
        name, params = equation.primitive.name, equation.params
        inner = list(bodies_of(params))
        if name in ("scan", "while", "cond"):
            return self._control(equation, inner, values, body, stack)
        if len(inner) == 1 and len(inner[0].invars) == len(values) and name != "pallas_call":
            values = [v._replace(number=next(self._numbers)) for v in values] if params.get("prevent_cse") else values
            return self.inline(inner[0], values, body, stack)
        if name not in CARRIERS:
            return self._node(equation, values, body, stack)
        # The partitioner moves one value to one place once, however often the program asks for it.
        key = (name, *(v.number for v in values), repr(params))
        if key not in self._made:
            self._made[key] = self._node(equation, values, body, stack)
        return self._made[key]

    def _node(self, equation: core.JaxprEqn, values: list[_Value], body: _Body, stack: str) -> list[_Value]:
        needs = _union(v.needs for v in values)
        source = values[0].source if equation.primitive.name in CARRIERS else ""
        if flops := count_equation(equation).flops:
            needs |= body.node(flops / _ways(equation), needs)
        found, unclear = _sends(equation)
        self.uncounted += unclear
        source = source or ("gradients" if any(_owed(v) for v in (*equation.invars, *equation.outvars)) else "")
        made = [self.fresh(source) for _ in equation.outvars]
        for one in found:
            needs |= body.node(0.0, needs)
            transfer = Transfer(one.kind, one.mesh_axes, one.bytes, body.times, source, stack, 0.0)
            body.found.append((len(body.flops) - 1, made[0].number, transfer))
        return [value._replace(needs=needs) for value in made]

    def _control(self, equation, inner: list[core.Jaxpr], values: list[_Value], body: _Body, stack: str):
        """Bodies that run on their own, and stand in the outer one as a single node."""
        name, needs, work = equation.primitive.name, _union(v.needs for v in values), 0.0
        times = equation.params.get("length", 1) if name == "scan" else 1
        for one in inner:
            given = values[1:] if name == "cond" else values
            aligned = len(given) == len(one.invars)
            own = _Body(body.times * times)
            sources = [v.source for v in given] if aligned else [""] * len(one.invars)
            self.inline(one, [self.fresh(s) for s in sources], own, stack)
            if own.found and name != "scan":
                self.uncounted.append(f"collectives in a {name!r} are counted as if it ran each of its bodies once")
            self.close(own, {})
            work += times * sum(own.flops)
        if work:
            needs |= body.node(work, needs)
        return [self.fresh("", needs) for _ in equation.outvars]


def _sends(equation: core.JaxprEqn) -> tuple[list[Move], list[str]]:
    """The collectives of one equation without bodies, and what is unclear about it."""
    name, mesh = equation.primitive.name, _mesh(equation)
    if mesh is None:
        return [], []
    if name in MANUAL:
        return _manual(equation, mesh), []
    out, given = equation.outvars[0], equation.invars
    after = _held(out)
    if name == "reshard":
        return moves(_bytes(given[0]), _held(given[0]), after, mesh), []
    if name == "dot_general":
        return moves(_bytes(out), _product(equation), after, mesh), []
    if name in REDUCTIONS:
        return moves(_bytes(out), _reduced(_held(given[0]), equation.params["axes"]), after, mesh), []
    lost = {axis for v in given for axis in _held(v).axes} - {axis for v in equation.outvars for axis in _held(v).axes}
    return [], [f"{name} of an array split over {', '.join(sorted(lost))}: the compiler decides"] if lost else []


def _manual(equation: core.JaxprEqn, mesh: dict[str, int]) -> list[Move]:
    kind, params = MANUAL[equation.primitive.name], equation.params
    named = params["axes"] if "axes" in params else params["axis_name"]
    axes = tuple(a for a in ((named,) if isinstance(named, str) else named) if mesh.get(a, 1) > 1)
    groups = params.get("axis_index_groups")
    ways = len(groups[0]) if groups else math.prod(mesh[a] for a in axes)
    whole = equation.outvars if kind == "all-gather" else equation.invars
    size = sum(_bytes(v) / math.prod(mesh[a] for a in _held(v).axes) for v in whole)
    return [Move(kind, axes, sent(kind, size, ways))] if ways > 1 else []


def _product(equation: core.JaxprEqn) -> Held:
    """How the result of a matrix product lies before anything is sent."""
    (contracted, batched) = equation.params["dimension_numbers"]
    operands = [_held(v) for v in equation.invars[:2]]
    gone = [set(c) | set(b) for c, b in zip(contracted, batched, strict=True)]
    free = [
        axes
        for held, dimensions in zip(operands, gone, strict=True)
        for i, axes in enumerate(held.split)
        if i not in dimensions
    ]
    kept = [operands[0].split[i] for i in batched[0]]
    owed = {a for held, dims in zip(operands, contracted, strict=True) for i in dims for a in held.split[i]}
    return Held((*kept, *free), frozenset(owed).union(*(held.owed for held in operands)))


def _reduced(held: Held, dimensions: Sequence[int]) -> Held:
    kept = tuple(axes for i, axes in enumerate(held.split) if i not in dimensions)
    return Held(kept, held.owed | {a for i in dimensions for a in held.split[i]})


def _ways(equation: core.JaxprEqn) -> int:
    """Over how many devices an equation's work is split."""
    mesh = _mesh(equation) or {}
    return math.prod(mesh[a] for a in {a for v in equation.invars for a in _held(v).axes})


def _mesh(equation: core.JaxprEqn) -> dict[str, int] | None:
    """Mesh axis → size, from an operand's type."""
    for variable in (*equation.outvars, *equation.invars):
        sharding = getattr(variable.aval, "sharding", None)
        if sharding is not None and not sharding.mesh.empty:
            return dict(sharding.mesh.shape)
    return None


def _held(variable: Any) -> Held:
    sharding = getattr(variable.aval, "sharding", None)
    return Held(()) if sharding is None else Held.of(sharding.spec, variable.aval.ndim)


def _owed(variable: Any) -> frozenset[str]:
    return _held(variable).owed


def _bytes(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize


def _union(sets: Iterable[int]) -> int:
    total = 0
    for one in sets:
        total |= one
    return total
