"""Learning rates, as data."""

from dataclasses import dataclass
from typing import Any, Protocol

import optax

from axon.checks import check_range
from axon.errors import UserError


class Schedule(Protocol):
    """A learning rate for every step."""

    def function(self) -> optax.Schedule: ...


@dataclass(frozen=True)
class Constant:
    """Linear warm-up to `peak` over `warmup` steps, then `peak`."""

    peak: float
    warmup: int = 0

    def __post_init__(self):
        _check(self)

    def function(self) -> optax.Schedule:
        return _warmed(self.warmup, self.peak, optax.constant_schedule(self.peak))


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `floor` × `peak` at step `steps` (Loshchilov & Hutter, 1608.03983)."""

    peak: float
    warmup: int
    steps: int
    floor: float = 0.1

    def __post_init__(self):
        _check_steps(self, self.warmup)

    def function(self) -> optax.Schedule:
        decay = optax.cosine_decay_schedule(self.peak, self.steps - self.warmup, self.floor)
        return _warmed(self.warmup, self.peak, decay)


@dataclass(frozen=True)
class Linear:
    """Linear warm-up, then a straight line down to `floor` × `peak` at step `steps`."""

    peak: float
    warmup: int
    steps: int
    floor: float = 0.0

    def __post_init__(self):
        _check_steps(self, self.warmup)

    def function(self) -> optax.Schedule:
        decay = optax.linear_schedule(self.peak, self.floor * self.peak, self.steps - self.warmup)
        return _warmed(self.warmup, self.peak, decay)


@dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay: `peak`, and in the last `decay` steps a line to `floor` × `peak` (arXiv:2404.06395)."""

    peak: float
    warmup: int
    steps: int
    decay: int
    floor: float = 0.0

    def __post_init__(self):
        _check_steps(self, self.warmup + self.decay)

    def function(self) -> optax.Schedule:
        fall = optax.linear_schedule(self.peak, self.floor * self.peak, self.decay)
        stable = self.steps - self.decay - self.warmup
        after = optax.join_schedules([optax.constant_schedule(self.peak), fall], [stable])
        return _warmed(self.warmup, self.peak, after)


def _warmed(warmup: int, peak: float, after: optax.Schedule) -> optax.Schedule:
    """`after`, preceded by `warmup` steps that rise to `peak`; the rate of step 0 is above 0."""
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup])


def _check(schedule: Any) -> None:
    check_range(schedule, "[0, inf)", "peak", "warmup")
    if hasattr(schedule, "floor"):
        check_range(schedule, "[0, 1]", "floor")


def _check_steps(schedule: Any, used: int) -> None:
    _check(schedule)
    if schedule.steps <= used:
        name = type(schedule).__name__
        raise UserError(f"{name}.steps is {schedule.steps}, and warm-up and decay alone take {used}; raise steps")


AnySchedule = Constant | Cosine | Linear | WSD
