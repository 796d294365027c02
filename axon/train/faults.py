"""What to do at a step whose loss is not a number, or much above those before; how long a step may take."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple, Self

import numpy as np

from axon.checks import check_range
from axon.composition import REPLAYS, ROLLS_BACK, SKIPS, Part
from axon.errors import UserError, suggest

POLICIES = ("stop", "skip", "rollback")
Limits = dict[str, np.float32]
"""The largest loss and gradient norm that are no fault."""


@dataclass(frozen=True)
class Spikes:
    """A step is a spike where its loss, or gradient norm, is far above those of the steps before.

    Args:
        loss, grad_norm: above the mean by how many standard deviations; None: not looked at.
        window: over so many steps, without faults, up to the one before the last. Before there are as many, nothing is
            a spike.
        policy: 'stop', 'skip' or 'rollback'. See `Faults`.
    """

    loss: float | None = 8.0
    grad_norm: float | None = None
    window: int = 100
    policy: str = "rollback"

    def __post_init__(self):
        check_range(self, "(0, inf)", "loss", "grad_norm")
        check_range(self, "[2, 10000]", "window")
        if self.loss is None and self.grad_norm is None:
            raise UserError(
                "Spikes.loss and Spikes.grad_norm are None, and nothing is a spike: set one, or Faults.spikes to None"
            )
        _check_policy("Spikes.policy", self.policy)


@dataclass(frozen=True)
class Faults:
    """The policy for a step that went wrong.

    'stop' ends the run, with nothing saved after the fault. 'skip' applies no update in that step, on all devices
    alike. 'rollback' restores the last checkpoint and goes on with the same batches in the same order, without those
    of the fault.

    Args:
        not_finite: what to do where the loss or a gradient is not finite. spikes: which steps are spikes; None: none.
        skips: how many steps may be skipped in all, and skips_in_a_row one after another, before the run stops.
        rollbacks: how often the run may be rolled back before it stops.
        leave_out: how many batches a rollback leaves out: that of the fault, and those before it.
        hang_seconds: a step that takes longer is hung: the process writes its stacks and ends; None: never. At least 1,
            as it is looked at once a second.
        hang_seconds_besides: the same for compiling, restoring, saving, evaluating and sampling.
        replay_every: after so many steps one is done twice and compared bit for bit, which finds devices that compute
            wrongly; None: never. It needs room for one state more (`axon.train.replay`).
    """

    not_finite: str = "stop"
    spikes: Spikes | None = None
    skips: int = 100
    skips_in_a_row: int = 5
    rollbacks: int = 3
    leave_out: int = 1
    hang_seconds: float | None = 1800.0
    hang_seconds_besides: float | None = 7200.0
    replay_every: int | None = None

    def __post_init__(self):
        check_range(self, "[1, inf)", "skips", "skips_in_a_row", "rollbacks", "leave_out", "replay_every")
        check_range(self, "[1, 2**31)", "hang_seconds", "hang_seconds_besides")
        _check_policy("Faults.not_finite", self.not_finite)

    @property
    def can_skip(self) -> bool:
        """Whether the compiled step decides whether its update is applied."""
        return "skip" in (self.not_finite, self.spikes and self.spikes.policy)

    @property
    def can_roll_back(self) -> bool:
        """Whether the run may be rolled back."""
        return "rollback" in (self.not_finite, self.spikes and self.spikes.policy)

    @property
    def composition(self) -> tuple[Part, ...]:
        """What is done with a step that goes wrong: see `axon.composition`."""
        policies = {"Faults.not_finite": self.not_finite} | (
            {"Spikes.policy": self.spikes.policy} if self.spikes else {}
        )
        set_so = {policy: f"{field} = {policy!r}" for field, policy in policies.items()}
        skips = Part(set_so.get("skip", ""), "set it to 'rollback' or 'stop'", frozenset({SKIPS}))
        rolls_back = Part(set_so.get("rollback", ""), "set it to 'skip' or 'stop'", frozenset({ROLLS_BACK}))
        replays = Part(
            f"Faults.replay_every = {self.replay_every}", "set Faults.replay_every to None", frozenset({REPLAYS})
        )
        there = (skips, self.can_skip), (rolls_back, self.can_roll_back), (replays, self.replay_every is not None)
        return tuple(part for part, is_there in there if is_there)

    def hang_limit(self, phase: str) -> float | None:
        """How many seconds a phase may take."""
        return self.hang_seconds if phase in ("step", "batch") else self.hang_seconds_besides


def _check_policy(where: str, policy: str) -> None:
    if policy not in POLICIES:
        raise UserError(f"{where} is {policy!r}; must be one of {', '.join(POLICIES)}.{suggest(policy, POLICIES)}")


class Fault(NamedTuple):
    """A step that went wrong: `kind` is 'not_finite' or 'spike'; `loss_scale`: what its loss was multiplied by, if
    anything."""

    kind: str
    step: int
    policy: str
    loss: float
    grad_norm: float
    limits: Limits
    loss_scale: float | None = None

    @property
    def field(self) -> str:
        """Where its policy is set."""
        return "Spikes.policy" if self.kind == "spike" else "Faults.not_finite"

    @property
    def why(self) -> str:
        """`loss 9.3, gradient norm 1.2`, and what a spike is compared with."""
        scale = self.loss_scale
        scaled = "" if scale is None else f", loss scale {scale:g}, of which LossScale.floor is the least"
        said = f"loss {self.loss}, gradient norm {self.grad_norm}{scaled}"
        if self.kind == "not_finite":
            return said
        above = [f"{name.replace('_', ' ')} {value:.6g}" for name, value in self.limits.items() if isfinite(value)]
        return f"{said}, a spike: the limit is {' and '.join(above)}"


NO_LIMITS: Limits = {"loss": np.float32(inf), "grad_norm": np.float32(inf)}


@dataclass
class Monitor:
    """Finds faults in the metrics of steps, the same in every process.

    Args:
        faults: what they are. left_out: the numbers of the batches that are left out of the order.
        skips, rollbacks: how many there were.
    """

    faults: Faults = Faults()
    left_out: tuple[int, ...] = ()
    skips: int = 0
    in_a_row: int = 0
    rollbacks: int = 0
    _seen: deque[tuple[int, float, float]] = field(default_factory=deque)

    def limits(self, step: int) -> Limits:
        """The limits of step `step`, from the window that ends two steps before: metrics are read one step late."""
        spikes = self.faults.spikes
        if spikes is None:
            return NO_LIMITS
        seen = [numbers for at, *numbers in self._seen if at < step - 1][-spikes.window :]
        if len(seen) < spikes.window:
            return NO_LIMITS
        losses, norms = zip(*seen, strict=True)
        return {"loss": _limit(losses, spikes.loss), "grad_norm": _limit(norms, spikes.grad_norm)}

    def judge(self, step: int, values: Mapping[str, float]) -> Fault | None:
        """The fault of step `step`, by its metrics; None: there is none."""
        loss, norm, limits = values["loss"], values["grad_norm"], self.limits(step)
        spikes = self.faults.spikes
        if not (isfinite(loss) and isfinite(norm)):
            return Fault("not_finite", step, self.faults.not_finite, loss, norm, limits, values.get("loss_scale"))
        if spikes is not None and (loss > limits["loss"] or norm > limits["grad_norm"]):
            return Fault("spike", step, spikes.policy, loss, norm, limits, values.get("loss_scale"))
        if spikes is not None:
            self._seen.append((step, loss, norm))
            if len(self._seen) > spikes.window + 1:
                self._seen.popleft()
        self.in_a_row = 0
        return None

    def skip(self) -> bool:
        """Counts a skipped step; False if there have been too many."""
        self.skips += 1
        self.in_a_row += 1
        return self.skips <= self.faults.skips and self.in_a_row <= self.faults.skips_in_a_row

    def saved(self) -> dict[str, Any]:
        """What a checkpoint has to keep, as JSON; nothing where there is nothing."""
        counts = {"left_out": list(self.left_out), "skips": self.skips, "in_a_row": self.in_a_row}
        counts |= {"rollbacks": self.rollbacks, "seen": [list(one) for one in self._seen]}
        return {name: value for name, value in counts.items() if value}

    @classmethod
    def restored(cls, faults: Faults, saved: Mapping[str, Any]) -> Self:
        """The monitor that `saved` is of, with the policies of now."""
        seen = deque((step, loss, norm) for step, loss, norm in saved.get("seen", ()))
        counts = {name: saved.get(name, 0) for name in ("skips", "in_a_row", "rollbacks")}
        return cls(faults, tuple(saved.get("left_out", ())), **counts, _seen=seen)


def _limit(values: tuple[float, ...], deviations: float | None) -> np.float32:
    if deviations is None:
        return np.float32(inf)
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return np.float32(mean + deviations * sqrt(variance))
