"""What the backward of a traced period computes again, by what is kept by name: one trace says it of every policy."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from axon.plan.flops import count_equation, kernel_flops

FLASH = "axon_attention"
"""How the names of attention's kernels begin."""

SUMS = 64
"""From how many elements on a sum is a pass of its own through what it reads."""


class Again(NamedTuple):
    """FLOPs, those of kernels of attention among them, and elements that sums read."""

    flops: float = 0.0
    attention: float = 0.0
    summed: float = 0.0


@dataclass(frozen=True)
class Replay:
    """A period, forward and backward, without remat; its first `waiting` outputs wait between the two."""

    jaxpr: Jaxpr
    waiting: int

    def again(self, kept: Collection[str]) -> Again:
        """What lies behind the arrays that wait, up to those that are kept by these names."""
        total = Again()
        for _, cost in self._behind(kept):
            total = Again(*(a + b for a, b in zip(total, cost, strict=True)))
        return total

    def named(self, names: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Each array that has one of these names and that the backward needs, where all of them are kept."""
        for equation, _ in self._behind(names):
            if (name := name_of(equation)) is not None:
                yield name, equation.outvars[0].aval

    def _behind(self, kept: Collection[str]) -> Iterator[tuple[JaxprEqn, Again]]:
        """The equations behind the arrays that wait, the last first, up to those that name what is kept."""
        needed = {one for one in self.jaxpr.outvars[: self.waiting] if isinstance(one, Var)}
        for equation, cost in self._costs:
            if not needed.isdisjoint(equation.outvars):
                yield equation, cost
                if name_of(equation) not in kept:
                    needed.update(one for one in _read(equation) if isinstance(one, Var))

    @cached_property
    def names(self) -> frozenset[str]:
        """All names of activations."""
        return frozenset(name for equation in self.jaxpr.eqns if (name := name_of(equation)) is not None)

    @cached_property
    def _costs(self) -> list[tuple[JaxprEqn, Again]]:
        """The equations, the last first."""
        return [(one, _cost(one)) for one in reversed(self.jaxpr.eqns)]


def name_of(equation: JaxprEqn) -> str | None:
    """The name that an equation gives to an activation."""
    return equation.params["name"] if equation.primitive.name == "name" else None


def _read(equation: JaxprEqn) -> list[Any]:
    """What an equation reads: of a function with a derivative of its own, what that reads itself."""
    if equation.primitive.name != "custom_jvp_call":
        return equation.invars
    body = equation.params["call_jaxpr"].jaxpr
    used = {one for inner in body.eqns for one in inner.invars if isinstance(one, Var)}.union(body.outvars)
    return [outer for outer, one in zip(equation.invars, body.invars, strict=True) if one in used]


def _cost(equation: JaxprEqn) -> Again:
    return Again(count_equation(equation).flops, kernel_flops(equation, FLASH), _summed(equation))


def _summed(equation: JaxprEqn) -> float:
    if equation.primitive.name != "reduce_sum":
        return 0.0
    read, left = (math.prod(one.aval.shape) for one in (equation.invars[0], equation.outvars[0]))  # pyright: ignore[reportAttributeAccessIssue]
    return read if read >= SUMS * left else 0.0
