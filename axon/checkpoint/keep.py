"""When to save, and which checkpoints are kept."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from axon.checkpoint.orbax import training
from axon.checks import check_range
from axon.disk import named
from axon.errors import UserError
from axon.object_store import check_location


@dataclass(frozen=True)
class Checkpoints:
    """When to save, and which checkpoints to keep: those that any of the `keep…` keeps.

    Args:
        every: save after every so many steps. keep: the latest so many.
        asynchronous: training goes on while arrays are written.
        keep_every: those of every so many steps, a multiple of `every`. keep_hours: the first, and then one whenever
            so many hours have passed since the last one kept so. keep_best: so many with the lowest held-out loss.
        local_folder: a faster folder, as `/dev/shm/axon` or of a disk in the machine, into which the run saves besides
            after every `local_every` steps, fewer than `every`, and of those saves keeps the latest `local_keep`. All
            processes share it.
        mirror: where all checkpoints but those of the local folder are copied while training goes on, with what else a
            run needs to go on: `s3://BUCKET/PATH`, `gs://BUCKET/PATH`, or a folder. A run whose folder is empty, or
            older, is fetched from there.
    """

    every: int = 200
    keep: int = 2
    asynchronous: bool = True
    keep_every: int | None = None
    keep_hours: float | None = None
    keep_best: int | None = None
    local_folder: str | None = None
    local_every: int | None = None
    local_keep: int = 1
    mirror: str | None = None

    def __post_init__(self):
        check_range(self, "[1, inf)", "every", "keep", "keep_every", "keep_best", "local_every", "local_keep")
        check_range(self, "(0, inf)", "keep_hours")
        if self.keep_every is not None and self.keep_every % self.every:
            raise UserError(
                f"Checkpoints.keep_every is {self.keep_every}; must be a multiple of Checkpoints.every, {self.every}, "
                "or hardly any checkpoint is of such a step"
            )
        if (self.local_folder is None) != (self.local_every is None):
            unset = "local_folder" if self.local_folder is None else "local_every"
            raise UserError(f"Checkpoints.{unset} is not set; set both local_folder and local_every, or neither")
        if self.local_folder is not None:
            named(self.local_folder, "Checkpoints.local_folder")
        if self.mirror is not None:
            check_location(self.mirror, "Checkpoints.mirror")
        if self.local_every is not None and self.local_every >= self.every:
            write = f"local_every to {max(1, self.every // 10)}" if self.every > 1 else "every to 10"
            raise UserError(
                f"Checkpoints.local_every is {self.local_every}; must be less than Checkpoints.every, {self.every}, "
                f"since the local saves are those between the others. Set Checkpoints.{write}, as an example"
            )

    def due(self, step: int) -> bool:
        """Whether to save the state of this step."""
        return step % self.every == 0

    def due_locally(self, step: int) -> bool:
        """Whether to save the state of this step in the local folder, unless it is saved in the durable one."""
        return self.local_every is not None and step % self.local_every == 0

    def of_local(self) -> "Checkpoints":
        """The same for the local folder."""
        return Checkpoints(self.local_every or self.every, self.local_keep, self.asynchronous)


def kept(checkpoints: Checkpoints, losses: Mapping[int, float], copying: Set[int] = frozenset()) -> Any:
    """Orbax's policy for what is kept.

    Args:
        losses: held-out loss by step. copying: steps that are being copied elsewhere, kept for so long. Both are looked
            at whenever a save begins.
    """
    policies = training.preservation_policies
    asked: list[Any] = [policies.LatestN(checkpoints.keep), _Copied(copying)]
    if checkpoints.keep_every is not None:
        asked.append(policies.EveryNSteps(checkpoints.keep_every))
    if checkpoints.keep_hours is not None:
        asked.append(policies.EveryNSeconds(round(checkpoints.keep_hours * 3600)))
    if checkpoints.keep_best is not None:
        asked.append(_Best(checkpoints.keep_best, losses))
    return policies.AnyPreservationPolicy(asked)


def kept_steps(checkpoints: Checkpoints, losses: Mapping[int, float], saved: Mapping[int, int]) -> set[int]:
    """Those steps that `kept` keeps; `saved`: when each was saved, in nanoseconds since 1970."""
    infos = [_Info(step, datetime.fromtimestamp(saved[step] / 1e9)) for step in sorted(saved)]
    answers = kept(checkpoints, losses).should_preserve(infos, context=None)
    return {info.step for info, answer in zip(infos, answers, strict=True) if answer}


@dataclass(frozen=True)
class _Info:
    """Orbax's `PolicyCheckpointInfo`."""

    step: int
    time: datetime
    metrics: Any = None


@dataclass(frozen=True)
class _Copied:
    """Orbax's `PreservationPolicy`: those that are being copied."""

    steps: Set[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        return [one.step in self.steps for one in checkpoints]


@dataclass(frozen=True)
class _Best:
    """Orbax's `PreservationPolicy`: the `count` checkpoints with the lowest loss.

    Not its own `BestN`, which wants a checkpoint's metrics when it is saved: a run evaluates after that.
    """

    count: int
    losses: Mapping[int, float]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        known = [one.step for one in checkpoints if one.step in self.losses]
        best = sorted(known, key=lambda step: self.losses[step])[: self.count]
        return [one.step in best for one in checkpoints]
