"""Where batch `k` of a run comes from: a function of seed and `k`, or something that sees the state at step `k`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from axon.runtime import Runtime
from axon.train.objective import NextToken, Objective
from axon.train.references import References
from axon.train.state import State

Batch = dict[str, np.ndarray]
SequenceNumbers = slice | np.ndarray
"""Sequences of a global batch, as a slice or as ascending numbers."""
ALL = slice(None)


def numbered_without(position: int, left_out: Sequence[int]) -> int:
    """The number of the batch at `position` of the order without the batches numbered `left_out`."""
    for number in sorted(left_out):
        position += number <= position
    return position


@dataclass(frozen=True)
class FeedContext:
    """Where a feed begins, and the run that it feeds.

    Args:
        seed: the run's. runtime: the module that is trained, on the run's layout.
        start: how many batches were drawn before, without those of `left_out`: numbers of batches that the order lacks.
        sequences: which sequences of the global batch to give, as a process's share.
        saved: what `Feed.saved` gave when the checkpoint was written that the run continues from; empty at first.
        objective: what batches are for. references: its frozen models. report: called with each line that a person
            should see. folder: the run's, in which a feed may keep files while it is open; None: of no run.
    """

    seed: int
    runtime: Runtime
    start: int = 0
    sequences: SequenceNumbers = field(default_factory=lambda: ALL)
    left_out: Sequence[int] = ()
    saved: Mapping[str, Any] = field(default_factory=dict)
    objective: Objective = NextToken()
    references: References = field(default_factory=References)
    report: Callable[[str], None] = print
    folder: Path | None = None

    def numbers(self) -> Iterator[int]:
        """The numbers of the batches that the feed is to draw, in order, without end."""
        return (numbered_without(position, self.left_out) for position in count(self.start))


class Feed(AbstractContextManager[Any], ABC):
    """The batches of a run, one for each step. The end of the context closes it."""

    sees_state: ClassVar[bool] = False
    """Whether a batch depends on the state that it is trained on. If so, it is drawn when that state is there, and the
    metrics of the step before are read; otherwise while the step before runs, and the feed may read ahead."""

    @abstractmethod
    def draw(self, state: State) -> Batch:
        """The next batch: NumPy arrays, of each the sequences of this process.

        `state`: before the step that trains on it, with parameters and variables where the run has them. The step
        reuses its memory, so that it may not be kept. A feed that does not see the state must not read it."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Name → what the record of the step says of the batch drawn last; of a feed that sees the state alone."""
        return {}

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps between two steps, as JSON, so that a feed opened with it draws the same batches as
        this one would; empty where they follow from seed, number and state. Asked of a feed that sees the state."""
        return {}

    def close(self) -> None:
        """Give back threads and memory. May be called twice."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
