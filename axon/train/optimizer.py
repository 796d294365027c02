"""AdamW, 1-bit Adam and learning-rate schedules, as data."""

from dataclasses import dataclass
from typing import Any, Protocol

import optax

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
        _check_warmup(self)

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
    """`after`, begun once `warmup` steps have risen to `peak`; step 0 already learns."""
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup])


def _check_warmup(schedule: Any) -> None:
    if schedule.warmup < 0:
        raise UserError(f"{type(schedule).__name__}.warmup is {schedule.warmup}; write 0 or more")


def _check_steps(schedule: Any, used: int) -> None:
    _check_warmup(schedule)
    if schedule.steps <= used:
        name = type(schedule).__name__
        raise UserError(f"{name}.steps is {schedule.steps}, and warm-up and decay alone take {used}; raise steps")


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101).

    Args:
        schedule: the learning rate. b1, b2, eps: Adam's. weight_decay: on matrices only, never on norms and biases.
        clip: largest global norm of the gradients; None leaves them.
    """

    schedule: Constant | Cosine | Linear | WSD
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self):
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"AdamW.{name} is {getattr(self, name)}; write a share of at least 0 and below 1")
        if self.clip is not None and self.clip <= 0:
            raise UserError(f"AdamW.clip is {self.clip}; write a norm above 0, or None to leave gradients as they are")

    def transform(self, decayed: Any) -> optax.GradientTransformation:
        """The optax transformation; `decayed` is a tree of booleans like the parameters."""
        return optax.adamw(
            self.schedule.function(), b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, mask=decayed
        )


@dataclass(frozen=True)
class OneBitAdam:
    """1-bit Adam (Tang et al., arXiv:2102.02888) over the mesh axis `replica`.

    For `warmup` steps it is `AdamW`. Then the variance is frozen, each replica adds its own gradient to the common
    momentum, and the mean of these momenta over replicas travels as signs, with error feedback: see
    `axon.parallel.onebit`. Within a replica all is as ever.

    Args:
        schedule: the learning rate. warmup: steps of plain Adam, until the variance is steady: 15 to 25 % of a run in
            the paper. b1, b2, eps, weight_decay: AdamW's. clip: largest global norm of the gradients; after the
            warm-up, of each replica's own. None leaves them.
    """

    schedule: Constant | Cosine | Linear | WSD
    warmup: int
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0

    def __post_init__(self):
        if self.warmup < 1:
            raise UserError(
                f"OneBitAdam.warmup is {self.warmup}: with no step of plain Adam there is no variance to freeze; write "
                "1 or more"
            )
        AdamW(self.schedule, self.b1, self.b2, self.eps, self.weight_decay, self.clip)  # checks the rest

    @property
    def adamw(self) -> AdamW:
        """What the warm-up is."""
        return AdamW(self.schedule, self.b1, self.b2, self.eps, self.weight_decay, self.clip)
