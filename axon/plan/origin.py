"""What a value of a traced training step is: in which phase it is computed, and whether it is a weight's gradient.

A weight's gradient is recognised by where it goes: moved, scaled and added up at most, it leaves the backward, and the
optimizer makes new parameters and moments of it. An activation's gradient ends in a matrix product, or in a sum over
tokens.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from axon.parallel.pipeline.execute import BACKWARD_TICK, FORWARD_TICK
from axon.plan.equations import MANUAL
from axon.plan.flops import bodies_of

CARRIERS = (
    *("reshard", "mesh_cast", "convert_element_type", "reshape", "transpose", "squeeze", "slice", "split", "copy"),
    *("optimization_barrier",),
)
"""Primitives whose results are their operands, placed or cut otherwise: a weight stays a weight."""

LINEAR = (
    *("add", "add_any", "sub", "neg", "mul", "div", "select_n"),
    *("concatenate", "pad", "dynamic_update_slice", "broadcast_in_dim"),
)
"""Primitives by which the backward scales a weight's gradient, and adds it to others."""

MADE_EARLY = "gradients"
"""The named scope in which a function of the forward hands over gradients that it has computed already."""


def phase(stack: str) -> str:
    """forward, recomputed or backward, by a name stack; "" for what is outside of the differentiated function."""
    scopes = stack.split("/")
    if "rematted_computation" in stack:
        return "recomputed"
    if "transpose(" in stack or MADE_EARLY in scopes:
        return "backward"
    if BACKWARD_TICK in scopes:
        return "recomputed" if "jvp(" in stack else "backward"
    return "forward" if "jvp(" in stack or FORWARD_TICK in scopes else ""


def becoming_results(jaxpr: core.Jaxpr, results: Sequence[bool]) -> set[core.Var]:
    """The variables, those of inner bodies too, that become one of the marked `results` of a training step.

    In the differentiated function by `CARRIERS` and `LINEAR` alone; outside of it, in the optimizer, by any operation,
    unless they are single numbers.
    """
    found: set[core.Var] = set()
    _mark(jaxpr, results, found, "")
    return found


def _mark(jaxpr: core.Jaxpr, results: Sequence[bool], found: set[core.Var], stack: str) -> list[bool]:
    """Add to `found` what becomes one of the marked `results`; which of the arguments do."""
    found.update(v for v, marked in zip(jaxpr.outvars, results, strict=True) if marked and isinstance(v, core.Var))
    for equation in reversed(jaxpr.eqns):
        marked_results = [v in found for v in equation.outvars]
        if any(marked_results):
            given = _operands(equation, marked_results, found, f"{stack}/{equation.source_info.name_stack}")
            operands = zip(equation.invars, given, strict=True)
            found.update(v for v, marked in operands if marked and isinstance(v, core.Var))
    return [v in found for v in jaxpr.invars]


def _operands(
    equation: core.JaxprEqn, marked_results: Sequence[bool], found: set[core.Var], stack: str
) -> Sequence[bool]:
    """Which operands become one of an equation's results that are marked."""
    name, given = equation.primitive.name, equation.invars
    inner = list(bodies_of(equation.params))
    if name == "optimization_barrier":
        return marked_results
    if name == "scan":
        return _scan(equation, inner[0], marked_results, found, stack)
    if name == "cond":
        branches = [_mark(one, marked_results, found, stack) for one in inner]
        return [False, *map(any, zip(*branches, strict=True))]
    if len(inner) == 1 and len(inner[0].invars) == len(given) and name not in ("while", "pallas_call"):
        return _mark(inner[0], marked_results, found, stack)
    if not phase(stack):
        return [v.aval.shape != () for v in given]  # pyright: ignore[reportAttributeAccessIssue]
    return [name in CARRIERS or name in MANUAL or name in LINEAR] * len(given)


def _scan(
    equation: core.JaxprEqn, body: core.Jaxpr, marked_results: Sequence[bool], found: set[core.Var], stack: str
) -> Sequence[bool]:
    """A carry that becomes a result does so in every iteration before the last, too."""
    carry = _unstacked(equation.outvars, body.outvars)
    end = _unstacked(equation.invars, body.invars)  # constants, then carry, then what is stacked
    while True:
        given = _mark(body, marked_results, found, stack)
        again = [any(pair) for pair in zip(marked_results[:carry], given[end - carry : end], strict=True)]
        if again == list(marked_results[:carry]):
            return given
        marked_results = [*again, *marked_results[carry:]]


def _unstacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many variables come before those that have the loop's length in front outside of its body."""
    return sum(a.aval.shape == b.aval.shape for a, b in zip(outside, inside, strict=True))
