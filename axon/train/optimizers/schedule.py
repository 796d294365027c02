"""Learning rates, as data."""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import optax
from jax import Array

from axon.checks import check_range
from axon.errors import UserError
from axon.fields import field_values


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
        steps = self.steps - self.warmup
        decay = optax.cosine_decay_schedule(self.peak, steps, self.floor)
        return _warmed(self.warmup, self.peak, _ending_at(self.floor * self.peak, steps, decay))


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
        return _warmed(self.warmup, self.peak, _line(self.peak, self.floor * self.peak, self.steps - self.warmup))


@dataclass(frozen=True)
class WSD:
    """Warm-up, stable, decay: `peak`, and in the last `decay` steps a line to `floor` × `peak` (arXiv:2404.06395)."""

    peak: float
    warmup: int
    steps: int
    decay: int
    floor: float = 0.0

    def __post_init__(self):
        check_range(self, "[1, inf)", "decay")
        _check_steps(self, self.warmup + self.decay)

    def function(self) -> optax.Schedule:
        fall = _line(self.peak, self.floor * self.peak, self.decay)
        stable = self.steps - self.decay - self.warmup
        after = optax.join_schedules([optax.constant_schedule(self.peak), fall], [stable])
        return _warmed(self.warmup, self.peak, after)


def _warmed(warmup: int, peak: float, after: optax.Schedule) -> optax.Schedule:
    """`after`, preceded by `warmup` steps that rise to `peak`; the rate of step 0 is above 0."""
    if not warmup:
        return after
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([lambda step: jnp.minimum(rise(step), peak), after], [warmup])


def _line(peak: float, floor: float, steps: int) -> optax.Schedule:
    return _ending_at(floor, steps, optax.linear_schedule(peak, floor, steps))


def _ending_at(floor: float, steps: int, fall: optax.Schedule) -> optax.Schedule:
    """`fall`, never below `floor`, and `floor` itself from step `steps` on: XLA multiplies by a rounded 1 ÷ `steps`,
    and would end as much below it."""

    def rate(step: Any) -> Array:
        return jnp.where(step >= steps, floor, jnp.maximum(fall(step), floor))

    return rate


def _check(schedule: Any) -> None:
    check_range(schedule, "[0, inf)", "peak", "warmup")


def _check_steps(schedule: Any, used: int) -> None:
    _check(schedule)
    check_range(schedule, "[0, 1]", "floor")
    if schedule.steps <= used:
        name = type(schedule).__name__
        raise UserError(f"{name}.steps is {schedule.steps}, and warm-up and decay alone take {used}; raise steps")


def schedule_notices(optimizer: Any, steps: int) -> list[str]:
    """What a run of `steps` steps leaves unused of the schedules of `optimizer`, and does beyond them, a line each."""
    found = [line for one in _schedules(optimizer) if (line := _notice(one, steps))]
    if (warmup := getattr(optimizer, "warmup", 0)) >= steps:  # of 1-bit Adam
        found.append(f"Train.steps is {steps}, and {type(optimizer).__name__}.warmup {warmup}: nothing is compressed")
    return list(dict.fromkeys(found))


def _schedules(config: Any) -> Iterator[Any]:
    """Each schedule of an optimizer, and of those that it is made of."""
    if isinstance(config, AnySchedule):
        yield config
    elif is_dataclass(config):
        for value in field_values(config).values():
            yield from _schedules(value)


def _notice(schedule: Any, steps: int) -> str:
    name = type(schedule).__name__
    if steps < schedule.warmup:
        return f"Train.steps is {steps}: the run ends within {name}.warmup = {schedule.warmup}, below its peak rate"
    if isinstance(schedule, Constant) or steps == schedule.steps:
        return ""
    differ = f"Train.steps is {steps}, and {name}.steps {schedule.steps}"
    if steps > schedule.steps:
        return f"{differ}: the rate is {schedule.floor * schedule.peak:g} in the last {steps - schedule.steps} steps"
    last = float(schedule.function()(steps - 1))
    return f"{differ}: the run ends before the rate has fallen, at {last:.3g} of a peak of {schedule.peak:g}"


AnySchedule = Constant | Cosine | Linear | WSD
