"""The collectives of a traced step, read from its program: nothing is compiled, and no device is needed.

On Explicit mesh axes every collective is written in the program: a `reshard`, an operation whose result's type says
that its sum is done, or one of `lax`'s inside a `shard_map`. On Auto axes only the last are; the compiler adds more.
It may also send less than the program says: what a loop repeats unchanged it may do once, and it joins equal sums.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jax.extend import core

from axon.axes.patterns import Names
from axon.parallel.expert.rounds import OVERFLOW_ROUNDS
from axon.plan.equations import MANUAL, is_unreduced, num_shards, sends
from axon.plan.flops import bodies_of, count_equation
from axon.plan.origin import CARRIERS, MADE_EARLY, becoming_results, phase

WEIGHT_GRADIENTS = "gradients of weights"
ACTIVATION_GRADIENTS = "gradients of activations"
UPDATES = "gradients and updates"
"""Sources of what is no input: what becomes a result of the step, of which a part is made by the backward, and what
the backward makes besides."""


@dataclass(frozen=True)
class Transfer:
    """One collective of a step.

    Args:
        kind, mesh_axes, bytes: as of `Move`, each time. times: how often a step does it.
        source: what is moved: a label of the program's inputs or results, `WEIGHT_GRADIENTS`, `ACTIVATION_GRADIENTS`,
            `UPDATES`, or "" for what the forward makes.
        stack: the name stack of the operation, as `jvp(attention)/…`.
        overlappable: share of the FLOPs of the matrix products in the same loop body that neither make its operand nor
            need its result. The compiler may run these at the same time.
    """

    kind: str
    mesh_axes: Names
    bytes: float
    times: int
    source: str
    stack: str
    overlappable: float


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
    walk = _Walk(becoming_results(jaxpr, [bool(label) for label in outputs] or [True] * len(jaxpr.outvars)))
    body = _Body(1)
    results = walk.inline(jaxpr, [walk.fresh(label) for label in inputs or [""] * len(jaxpr.invars)], body, "")
    labels = {value.number: label for value, label in zip(results, outputs, strict=False) if label}
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

    def overlappable(self, node: int) -> float:
        """Share of all FLOPs in nodes that `node` does not need and that do not need it."""
        own = self.needs[node]
        free = sum(
            flops for i, flops in enumerate(self.flops) if flops and not own >> i & 1 and not self.needs[i] >> node & 1
        )
        return free / (sum(self.flops) or 1.0)


class _Walk:
    """Reads a program in its order; `results` are the variables that become one of its results."""

    def __init__(self, results: set[core.Var]):
        self.results = results
        self.transfers: list[Transfer] = []
        self.uncounted: list[str] = []
        self._numbers = itertools.count()
        self._resharded: dict[Any, list[_Value]] = {}

    def fresh(self, source: str = "", needs: int = 0) -> _Value:
        return _Value(next(self._numbers), source, needs)

    def close(self, body: _Body, labels: dict[int, str]) -> None:
        """Hand over what a body sends, now that all of it has been seen."""
        for node, number, transfer in body.found:
            source = labels.get(number, UPDATES) if transfer.source == UPDATES else transfer.source
            self.transfers.append(replace(transfer, source=source, overlappable=body.overlappable(node)))

    def inline(self, jaxpr: core.Jaxpr, values: Iterable[_Value], body: _Body, stack: str) -> list[_Value]:
        """Walk a jaxpr as a part of `body`; the values of its results."""
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, values, strict=True))

        def read(variable: Any) -> _Value:
            if isinstance(variable, core.Literal):
                return self.fresh()
            return known.setdefault(variable, self.fresh())

        for equation in jaxpr.eqns:
            where = f"{stack}/{equation.source_info.name_stack}"
            results = self._equation(equation, [read(v) for v in equation.invars], body, where)
            known.update(zip(equation.outvars, results, strict=True))
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
        if key not in self._resharded:
            self._resharded[key] = self._node(equation, values, body, stack)
        return self._resharded[key]

    def _node(self, equation: core.JaxprEqn, values: list[_Value], body: _Body, stack: str) -> list[_Value]:
        needs = _union(v.needs for v in values)
        sources = self._sources(equation, values, stack)
        if flops := count_equation(equation).flops:
            needs |= body.node(flops / num_shards(equation), needs)
        found, unclear = sends(equation)
        self.uncounted += unclear
        results = [self.fresh(source) for source in sources]
        for one in found:
            needs |= body.node(0.0, needs)
            source = self._moved(equation, sources[0], stack)
            transfer = Transfer(one.kind, one.mesh_axes, one.bytes, body.times, source, stack, 0.0)
            body.found.append((len(body.flops) - 1, results[0].number, transfer))
        return [value._replace(needs=needs) for value in results]

    def _sources(self, equation: core.JaxprEqn, values: list[_Value], stack: str) -> list[str]:
        """Where each of an equation's results comes from: carried on, or computed here."""
        if equation.primitive.name not in CARRIERS and equation.primitive.name not in MANUAL:
            return [ACTIVATION_GRADIENTS if phase(stack) == "backward" else ""] * len(equation.outvars)
        given = [v.source for v in values]
        return given if len(given) == len(equation.outvars) else given[:1] * len(equation.outvars)

    def _moved(self, equation: core.JaxprEqn, source: str, stack: str) -> str:
        """What a collective carries, by where it comes from and where it goes."""
        if source not in ("", ACTIVATION_GRADIENTS):
            return source
        if equation.outvars[0] in self.results:
            return WEIGHT_GRADIENTS if phase(stack) or any(map(is_unreduced, equation.invars)) else UPDATES
        return ACTIVATION_GRADIENTS if MADE_EARLY in stack.split("/") else source

    def _control(self, equation, inner: list[core.Jaxpr], values: list[_Value], body: _Body, stack: str):
        """Bodies that run on their own, and stand in the outer one as a single node."""
        name, needs, work = equation.primitive.name, _union(v.needs for v in values), 0.0
        if name == "while" and OVERFLOW_ROUNDS in stack:
            self._seldom(inner, body, stack)
            return [self.fresh("", needs) for _ in equation.outvars]
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
        source = ACTIVATION_GRADIENTS if phase(stack) == "backward" else ""
        return [self.fresh(source, needs) for _ in equation.outvars]

    def _seldom(self, inner: list[core.Jaxpr], body: _Body, stack: str) -> None:
        """Bodies of a loop that a load of experts within capacity never enters: not counted, but told."""
        begin = len(self.transfers)
        for one in inner:
            own = _Body(body.times)
            self.inline(one, [self.fresh() for _ in one.invars], own, stack)
            self.close(own, {})
        size = sum(one.bytes * one.times for one in self.transfers[begin:]) / body.times
        del self.transfers[begin:]
        if size:
            self.uncounted.append(
                f"experts' rounds after the first, which only a load beyond capacity takes: each sends {size:,.0f} "
                f"bytes a device in the {phase(stack) or 'forward'}"
            )


def _union(sets: Iterable[int]) -> int:
    total = 0
    for one in sets:
        total |= one
    return total
