"""A pipeline's schedule as data: for every tick and stage, which microbatch runs forward or backward there."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from axon.parallel.pipeline.chunks import Chunks


class Action(IntEnum):
    """The work of a stage in a tick."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    """Gradients of the inputs and of the weights at once."""
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4


LETTERS = {
    Action.IDLE: ".",
    Action.FORWARD: "F",
    Action.BACKWARD: "B",
    Action.BACKWARD_INPUT: "I",
    Action.BACKWARD_WEIGHT: "W",
}
"""How an action is written in pictures and files."""


class Work(NamedTuple):
    """One action on one microbatch by one of a stage's chunks of the model."""

    action: Action
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{LETTERS[self.action]}{self.microbatch}" + (f"/{self.chunk}" if self.chunk else "")


class Cell(NamedTuple):
    """A cell of a table that is not idle."""

    tick: int
    stage: int
    work: Work


class Step(NamedTuple):
    """Work, with the logical number of its chunk: whichever stage does it."""

    action: Action
    microbatch: int
    logical: int


@dataclass(frozen=True, eq=False)
class Table:
    """Ticks × stages. A result of tick t can be used from tick t + 1 on, by whichever stage needs it.

    Attributes:
        action, microbatch, chunk: int arrays `[tick, stage]`; a cell that is idle has zeros in all three.
        microbatches: how many there are in a batch.
        chunks: where the parts of the model are.
        flush: whether the pipeline is empty between batches. Without, the table is one period of a schedule that goes
            on: what is in flight after the last tick is finished in the next period (see `periodic.ages`).
    """

    action: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    microbatches: int
    chunks: Chunks
    flush: bool = True

    @property
    def ticks(self) -> int:
        return self.action.shape[0]

    @property
    def stages(self) -> int:
        return self.chunks.stages

    @property
    def split(self) -> bool:
        """Whether some backward is split into one for the inputs and one for the weights."""
        return bool(np.any(self.action == Action.BACKWARD_INPUT))

    @property
    def backwards(self) -> bool:
        """Whether there are backwards."""
        return bool(np.any(self.action > Action.FORWARD))

    @property
    def uniform(self) -> bool:
        """Whether in every tick all stages that are not idle do the same action."""
        highest = self.action.max(axis=1, keepdims=True)
        return bool(np.all((self.action == highest) | (self.action == Action.IDLE)))

    def work(self, tick: int, stage: int) -> Work:
        at = (tick, stage)
        return Work(Action(int(self.action[at])), int(self.microbatch[at]), int(self.chunk[at]))

    def cells(self) -> Iterator[Cell]:
        """All cells that are not idle, tick by tick."""
        for tick, stage in np.argwhere(self.action != Action.IDLE).tolist():
            yield Cell(tick, stage, self.work(tick, stage))

    def orders(self) -> list[list[Work]]:
        """The work of each stage, one after the other."""
        orders: list[list[Work]] = [[] for _ in range(self.stages)]
        for cell in self.cells():
            orders[cell.stage].append(cell.work)
        return orders

    @staticmethod
    def of(cells: Iterable[Cell], microbatches: int, chunks: Chunks, flush: bool = True) -> "Table":
        """The table with these cells, and no tick after the last of them."""
        cells = list(cells)
        arrays = np.zeros((3, max(cell.tick for cell in cells) + 1, chunks.stages), int)
        for tick, stage, work in cells:
            arrays[:, tick, stage] = work
        return Table(*arrays, microbatches=microbatches, chunks=chunks, flush=flush)


def step_of(stage: int, work: Work, chunks: Chunks) -> Step:
    return Step(work.action, work.microbatch, chunks.logical(stage, work.chunk))


def result(step: Step) -> Step:
    """What a step makes, as `needs` names it: a whole backward makes the inputs' gradient too."""
    return step._replace(action=Action.BACKWARD_INPUT) if step.action == Action.BACKWARD else step


def needs(step: Step, chunks: Chunks) -> list[Step]:
    """The results that a step waits for."""
    action, microbatch, logical = step
    if action == Action.FORWARD:
        return [Step(Action.FORWARD, microbatch, logical - 1)] if logical else []
    if action == Action.BACKWARD_WEIGHT:
        return [Step(Action.BACKWARD_INPUT, microbatch, logical)]
    after = [Step(Action.BACKWARD_INPUT, microbatch, logical + 1)] if logical < chunks.total - 1 else []
    return [Step(Action.FORWARD, microbatch, logical), *after]
