"""A chunk's forward or backward as equations: whole, or in what its input's gradient needs and what weights wait for.

A function is traced once, its layers one after the other. Whole, all of it is the first of two parts. Split, those
equations that only a gradient of weights needs are the second, from the first contraction on, and the first leaves what
the second needs of it: so neither computes again what the other has (Qi et al., arXiv:2401.10241, section 2).

Arrays with an axis of layers are given as they are made, a layer at a time: stacked, they would be written once more.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
from jax.extend import core
from jax.extend.core import primitives

from axon.parallel.pipeline.region import bytes_per_device

Closed: Any = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
"""A traced function with its constants."""

INLINED = (primitives.jit_p, primitives.remat_p)
"""Calls whose bodies' equations are parted as their own."""

FREE = frozenset(
    ("convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reshard", "copy", "slice")
)
"""Operations of one array that the second part does again, rather than wait for a result that takes more memory."""

COLLECTIVES = frozenset(("reshard",))
"""Those of `FREE` that send."""


Pieces = Sequence[Any]
"""What an array is made of, one after the other along its first axis."""


@dataclass(frozen=True)
class Equations:
    """The two parts of a function of arrays, functions of what it is a function of.

    Args:
        first: gives results and what is left for the second, which is given that too. first_gives, second_gives: number
            of one of the function's results → in how many pieces either part gives it.
        types: of what is left. result_types: of the pieces of each result.
    """

    first: Any
    second: Any
    first_gives: Mapping[int, int]
    second_gives: Mapping[int, int]
    types: Sequence[Any]
    result_types: Sequence[Pieces]

    @staticmethod
    def of(
        fn: Callable[..., Sequence[Array]], arguments: Sequence[Array], at_once: int = 0, until: int | None = None
    ) -> "Equations":
        """The parts of a function of arrays, whose results from number `at_once` on the first must give, but for those
        from number `until` on: these the second gives, of what is left of them in the form that takes least memory."""
        traced = jax.make_jaxpr(fn)(*arguments)
        traced = jax.make_jaxpr(lambda *given: _inlined(traced, given))(*arguments)
        given, results = traced.jaxpr.invars, _pieces(traced)
        equations = _needed(traced.eqns, results)
        needed = set(map(id, _needed(equations, results[at_once:])))
        second = _after_contractions([one for one in equations if id(one) not in needed])
        first, after = ([one for one in equations if (id(one) in second) == late] for late in (False, True))
        made = {out for one in after for out in one.outvars}
        end = len(results) if until is None else until
        is_late = [n >= end or not made.isdisjoint(_variables(of)) for n, of in enumerate(results)]
        first_gives, second_gives = (
            {n: of for n, of in enumerate(results) if is_late[n] == late} for late in (False, True)
        )
        read = {v for one in after for v in _read(one)} | {v for of in second_gives.values() for v in _variables(of)}
        at_hand, free = {*given, *traced.jaxpr.constvars}, FREE if until is None else FREE - COLLECTIVES
        again, left = _left(first, read - at_hand, at_hand, free)
        return Equations(
            _part(traced, given, [*_joined(first_gives), *left], first),
            _part(
                traced, [*given, *left], _joined(second_gives), [one for one in equations if id(one) in second | again]
            ),
            {n: len(of) for n, of in first_gives.items()},
            {n: len(of) for n, of in second_gives.items()},
            [v.aval for v in left],
            [[v.aval for v in pieces] for pieces in results],
        )

    def run_first(self, arguments: Sequence[Array]) -> tuple[dict[int, Pieces], Sequence[Array]]:
        """Results by number, and what is left for the second part."""
        made = iter(core.jaxpr_as_fun(self.first)(*arguments))
        return _taken(self.first_gives, made), list(made)

    def run_second(self, arguments: Sequence[Array], left: Sequence[Array]) -> dict[int, Pieces]:
        """The other results."""
        return _taken(self.second_gives, iter(core.jaxpr_as_fun(self.second)(*arguments, *left)))


def _part(traced: Any, given: Any, results: Any, equations: Sequence[core.JaxprEqn]) -> Any:
    """Some of a traced function's equations as a function."""
    constants, effects = traced.jaxpr.constvars, traced.effects
    part = core.Jaxpr(constants, given, results, equations, effects, traced.jaxpr.debug_info)
    return Closed(part, traced.consts)


def _joined(results: Mapping[int, Pieces]) -> list[Any]:
    return [piece for pieces in results.values() for piece in pieces]


def _taken(counts: Mapping[int, int], made: Iterator[Array]) -> dict[int, Pieces]:
    return {number: list(itertools.islice(made, count)) for number, count in counts.items()}


# ---- which equation is of which part ---------------------------------------------------------------------------------


def _pieces(traced: Any) -> list[Pieces]:
    """Of each result what it is stacked of; itself, where it is not."""
    stacks = {
        one.outvars[0]: one.invars
        for one in traced.eqns
        if one.primitive.name == "concatenate" and one.params["dimension"] == 0
    }
    return [[v] if isinstance(v, core.Literal) else list(stacks.get(v, [v])) for v in traced.jaxpr.outvars]


def _variables(values: Iterable[Any]) -> list[core.Var]:
    return [v for v in values if not isinstance(v, core.Literal)]


def _read(one: core.JaxprEqn) -> list[core.Var]:
    return _variables(one.invars)


def _needed(equations: Sequence[core.JaxprEqn], results: Iterable[Pieces]) -> list[core.JaxprEqn]:
    """The equations that these results need, or that do something besides."""
    wanted, needed = {v for pieces in results for v in _variables(pieces)}, []
    for one in reversed(equations):
        if one.effects or not wanted.isdisjoint(one.outvars):
            needed.append(one)
            wanted.update(_read(one))
    return needed[::-1]


def _after_contractions(equations: Sequence[core.JaxprEqn]) -> set[int]:
    """The contractions among these equations, by id, and what needs their results."""
    made, found = set(), set()
    for one in equations:
        if _contracts(one) or not made.isdisjoint(_read(one)):
            found.add(id(one))
            made.update(one.outvars)
    return found


def _contracts(one: core.JaxprEqn) -> bool:
    """Whether an equation is a contraction, or has a body that may have some."""
    return one.primitive == primitives.dot_general_p or any(True for _ in core.jaxprs_in_params(one.params))


def _left(
    first: Sequence[core.JaxprEqn], read: set[core.Var], at_hand: set[core.Var], free: Collection[str]
) -> tuple[set[int], list[core.Var]]:
    """The equations of the first part, by id, that the second does again for what it reads, all of them `free`; and
    what it is left. What is `at_hand` it has anyway: a layer's part of what is kept of all."""
    read, again, left = set(read), set(), []
    for one in reversed(first):
        source = _read(one)
        for value in one.outvars:
            if value in read:
                if (
                    one.primitive.name in free
                    and len(source) == 1
                    and (source[0] in at_hand or bytes_per_device(source[0].aval) <= bytes_per_device(value.aval))
                ):
                    again.add(id(one))
                    read.update(source)
                else:
                    left.append(value)
    return again, left


# ---- bodies written out ----------------------------------------------------------------------------------------------


def _inlined(traced: Any, given: Sequence[Any]) -> Sequence[Any]:
    """The results of a traced function, its calls and unrolled loops written out."""
    jaxpr = traced.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *given], strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else values[v]

    for one in jaxpr.eqns:
        inputs = list(map(value, one.invars))
        if one.primitive in INLINED:
            if one.params.get("prevent_cse"):
                inputs = lax.optimization_barrier(inputs)  # as the call has it: what is computed again is not kept
            with jax.named_scope(str(one.source_info.name_stack)):
                outputs = _inlined(_closed(one.params["jaxpr"]), inputs)
        elif one.primitive == primitives.scan_p and one.params["unroll"] == one.params["length"]:
            with jax.named_scope(str(one.source_info.name_stack)):
                outputs = _unrolled(one, inputs)
        else:
            read = _read(one)
            alone = core.Jaxpr((), read, one.outvars, [one], one.effects, jaxpr.debug_info)
            outputs = core.jaxpr_as_fun(_closed(alone))(*map(value, read))
        values.update(zip(one.outvars, outputs, strict=True))
    return list(map(value, jaxpr.outvars))


def _closed(jaxpr: Any) -> Any:
    return jaxpr if isinstance(jaxpr, Closed) else Closed(jaxpr, ())


def _unrolled(loop: core.JaxprEqn, given: Sequence[Any]) -> Sequence[Any]:
    """A scan's results, one step after the other. What it scans over, or stacks, has an axis more than in its body."""
    body, length = loop.params["jaxpr"], loop.params["length"]
    pairs = zip(loop.invars, body.jaxpr.invars, strict=True), zip(loop.outvars, body.jaxpr.outvars, strict=True)
    whole_inputs, carries = (sum(_ndim(a) == _ndim(b) for a, b in each) for each in pairs)
    constants = whole_inputs - carries
    carry, scanned = list(given[constants:whole_inputs]), given[whole_inputs:]
    stacked: list[list[Array]] = [[] for _ in loop.outvars[carries:]]
    numbers = range(length)[::-1] if loop.params["reverse"] else range(length)
    for number in numbers:
        slices = [lax.index_in_dim(x, number, keepdims=False) for x in scanned]
        out = _inlined(body, [*given[:constants], *carry, *slices])
        carry = out[:carries]
        for each, new in zip(stacked, out[carries:], strict=True):
            each.append(lax.expand_dims(new, (0,)))
    return [*carry, *(lax.concatenate([each[numbers.index(n)] for n in range(length)], 0) for each in stacked)]


def _ndim(value: Any) -> int:
    return value.aval.ndim
