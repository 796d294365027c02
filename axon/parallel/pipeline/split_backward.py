"""A chunk's backward in two: what its input's gradient needs, and the contractions that weights alone wait for.

The backward is traced once and its equations are parted: those that only a gradient of weights needs, from the first
contraction on, are the second part, all others the first, which leaves what the second needs of it. So neither computes
again what the other has (Qi et al., arXiv:2401.10241, section 2).
"""

from collections.abc import Callable, Iterable, Sequence
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

FREE = ("convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "reshard", "copy", "slice")
"""Operations of one array that the second part does again, rather than wait for a result that takes more memory."""


@dataclass(frozen=True)
class SplitBackward:
    """The two parts of a backward, functions of what it is a function of.

    Args:
        first: gives results and what is left for the second, which is given that too. first_gives, second_gives: of the
            backward's results, the numbers of those that either part gives.
        types: of what is left.
    """

    first: Any
    second: Any
    first_gives: Sequence[int]
    second_gives: Sequence[int]
    types: Sequence[Any]

    @staticmethod
    def of(backward: Callable[..., Sequence[Array]], arguments: Sequence[Array], at_once: int) -> "SplitBackward":
        """Of a function of arrays, whose results from number `at_once` on the first part must give."""
        traced = jax.make_jaxpr(backward)(*arguments)
        traced = jax.make_jaxpr(lambda *given: _inlined(traced, given))(*arguments)
        results, given = traced.jaxpr.outvars, traced.jaxpr.invars
        needed = _needed(traced.eqns, results)
        equations = [one for one in traced.eqns if id(one) in needed]
        needed = _needed(equations, results[at_once:])
        second = _after_contractions([one for one in equations if id(one) not in needed])
        first, after = ([one for one in equations if (id(one) in second) == late] for late in (False, True))
        again, left = _left(first, {v for one in after for v in _read(one)})
        late = {out for one in after for out in one.outvars}
        second_gives = [n for n, v in enumerate(results) if not isinstance(v, core.Literal) and v in late]
        first_gives = [n for n in range(len(results)) if n not in second_gives]
        after = [one for one in equations if id(one) in second | again]
        return SplitBackward(
            _part(traced, given, [*(results[n] for n in first_gives), *left], first),
            _part(traced, [*given, *left], [results[n] for n in second_gives], after),
            first_gives,
            second_gives,
            [v.aval for v in left],
        )

    def run_first(self, arguments: Sequence[Array]) -> tuple[dict[int, Array], Sequence[Array]]:
        """Results by number, and what is left for the second part."""
        made = core.jaxpr_as_fun(self.first)(*arguments)
        results = len(self.first_gives)
        return dict(zip(self.first_gives, made[:results], strict=True)), made[results:]

    def run_second(self, arguments: Sequence[Array], left: Sequence[Array]) -> dict[int, Array]:
        """The other results."""
        return dict(zip(self.second_gives, core.jaxpr_as_fun(self.second)(*arguments, *left), strict=True))


def _part(traced: Any, given: Any, results: Any, equations: Sequence[core.JaxprEqn]) -> Any:
    """Some of a traced function's equations as a function."""
    constants, effects = traced.jaxpr.constvars, traced.effects
    part = core.Jaxpr(constants, given, results, equations, effects, traced.jaxpr.debug_info)
    return Closed(part, traced.consts)


# ---- which equation is of which part ---------------------------------------------------------------------------------


def _needed(equations: Sequence[core.JaxprEqn], results: Iterable[Any]) -> set[int]:
    """The equations, by id, that these results need."""
    wanted, needed = {v for v in results if not isinstance(v, core.Literal)}, set()
    for one in reversed(equations):
        if one.effects or not wanted.isdisjoint(one.outvars):
            needed.add(id(one))
            wanted.update(_read(one))
    return needed


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


def _left(first: Sequence[core.JaxprEqn], read: set[core.Var]) -> tuple[set[int], list[core.Var]]:
    """Of what the second part reads: the equations of the first, by id, that it does again; and what it is left."""
    read, again, left = set(read), set(), []
    for one in reversed(first):
        source = _read(one)
        for value in one.outvars:
            if value in read:
                if (
                    one.primitive.name in FREE
                    and len(source) == 1
                    and bytes_per_device(source[0].aval) <= bytes_per_device(value.aval)
                ):
                    again.add(id(one))
                    read.update(source)
                else:
                    left.append(value)
    return again, left


def _read(one: core.JaxprEqn) -> list[core.Var]:
    return [v for v in one.invars if not isinstance(v, core.Literal)]


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
