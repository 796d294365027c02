"""Outer methods: replicas train apart for a number of steps, then one outer step moves their common parameters.

Only that step crosses the link between replicas. Both methods keep the parameters `x` that all replicas last agreed
on, and one momentum of the parameters' size.
"""

from dataclasses import dataclass
from typing import Any

from jax import Array

from axon.checks import check_range
from axon.composition import AVERAGES, ONE_BIT, REPLICAS, Part


@dataclass(frozen=True)
class OuterMethod:
    """The base of both: `every` so many inner steps there is one outer step, with a rate and a momentum of its own."""

    every: int
    learning_rate: float
    momentum: float

    def __post_init__(self):
        check_range(self, "[1, inf)", "every")
        check_range(self, "(0, inf)", "learning_rate")
        check_range(self, "[0, 1)", "momentum")

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        excludes = {
            ONE_BIT: "one lets replicas train separately, the other exchanges momentum between them in every step",
            AVERAGES: "one evaluates the average over replicas, the other that over steps",
        }
        name = f"Train.outer = {type(self).__name__}"
        return (Part(name, "set Train.outer to None", frozenset({REPLICAS}), excludes),)


@dataclass(frozen=True)
class DiLoCo(OuterMethod):
    """Distributed low-communication training (Douillard et al., arXiv:2311.08105).

    With Δ = x − mean over replicas of their parameters: `m ← momentum·m + Δ`, `x ← x − learning_rate·(Δ + momentum·m)`,
    which is SGD with Nesterov's momentum. Every replica goes on from x, with its own Adam state.

    Args:
        every: inner steps to one outer step. learning_rate, momentum: the outer ones.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    def update(self, x: Array, mean: Array, m: Array, rate: Any) -> tuple[Array, Array]:
        """The next `x` and `m`. `rate`, the inner learning rate, is not used."""
        gradient = x - mean
        m = self.momentum * m + gradient
        return x - self.learning_rate * (gradient + self.momentum * m), m


@dataclass(frozen=True)
class SlowMo(OuterMethod):
    """Slow momentum on top of local steps (Wang et al., arXiv:1910.00643).

    With γ the inner learning rate: `u ← momentum·u + (x − mean over replicas of their parameters) / γ`,
    `x ← x − learning_rate·γ·u`. Every replica goes on from x, with its own Adam state. γ is the mean of the schedule
    over the inner steps of the round, so that u counts inner updates in units of their rate while the rate changes.

    Args:
        every: inner steps to one outer step. learning_rate: the slow one, α in the paper; momentum: the slow one, β.
            With learning_rate 1 and momentum 0 the replicas' parameters are averaged: local SGD.
    """

    learning_rate: float = 1.0
    momentum: float = 0.5

    def update(self, x: Array, mean: Array, u: Array, rate: Any) -> tuple[Array, Array]:
        """The next `x` and `u`; `rate` is γ, above 0."""
        u = self.momentum * u + (x - mean) / rate
        return x - self.learning_rate * rate * u, u
