"""When to save, and which checkpoints are kept."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from axon.checks import check_range
from axon.disk import check_paths
from axon.errors import UserError
from axon.fields import FolderPath, Location


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
    local_folder: FolderPath | None = None
    local_every: int | None = None
    local_keep: int = 1
    mirror: Location | None = None

    def __post_init__(self):
        check_range(self, "[1, inf)", "every", "keep", "keep_every", "keep_best", "local_every", "local_keep")
        check_range(self, "(0, 10**6]", "keep_hours")
        check_paths(self)
        if self.keep_every is not None and self.keep_every % self.every:
            raise UserError(
                f"Checkpoints.keep_every is {self.keep_every}; must be a multiple of Checkpoints.every, {self.every}, "
                "or hardly any checkpoint is of such a step"
            )
        if (self.local_folder is None) != (self.local_every is None):
            unset = "local_folder" if self.local_folder is None else "local_every"
            raise UserError(f"Checkpoints.{unset} is not set; set both local_folder and local_every, or neither")
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


def steps_to_keep(
    checkpoints: Checkpoints,
    losses: Mapping[int, float],
    saved: Mapping[int, int],
    damaged: Callable[[int], bool] = lambda step: False,
) -> set[int]:
    """The steps to keep of those `saved`: step → when, in nanoseconds since 1970.

    Args:
        losses: held-out loss by step. damaged: whether a checkpoint is known to be: such a one is not counted among
            those that are kept, and deleted once there are enough later ones. Asked of as few as will do.
    """
    steps = sorted(saved)
    kept = latest_intact(steps, checkpoints.keep, damaged)
    if checkpoints.keep_every is not None:
        kept |= {step for step in steps if step % checkpoints.keep_every == 0}
    if checkpoints.keep_hours is not None:
        kept |= _apart(steps, saved, round(checkpoints.keep_hours * 3600 * 10**9))
    if checkpoints.keep_best is not None:
        known = sorted((step for step in steps if math.isfinite(losses.get(step, math.nan))), key=losses.__getitem__)
        kept |= {*islice((step for step in known if not damaged(step)), checkpoints.keep_best)}
    return kept


def latest_intact(steps: Sequence[int], count: int, damaged: Callable[[int], bool]) -> set[int]:
    """The latest `count` of ascending steps that are not damaged, and what is damaged among them."""
    kept, intact = set[int](), 0
    for step in reversed(steps):
        if intact == count:
            break
        kept.add(step)
        intact += not damaged(step)
    return kept


def _apart(steps: Sequence[int], saved: Mapping[int, int], nanoseconds: int) -> set[int]:
    """The first, and then each that was saved at least so long after the last of these."""
    kept = list(steps[:1])
    for step in steps[1:]:
        if saved[step] - saved[kept[-1]] >= nanoseconds:
            kept.append(step)
    return {*kept}
