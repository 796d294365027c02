"""A uniform table as loops: the same few actions many times over."""

from collections.abc import Sequence
from typing import NamedTuple

from axon.parallel.pipeline.periodic import ages
from axon.parallel.pipeline.table import Action, Table

LONGEST = 6
"""Actions in a loop's body."""


class Phase(NamedTuple):
    """From tick `start` on, `times` times all of `actions`, one a tick."""

    start: int
    actions: tuple[Action, ...]
    times: int


def phases(table: Table) -> list[Phase]:
    """The ticks of a uniform table, as few loops: 1F1B in lockstep is F × p, (B F) × (m − 1), B × p.

    The table's rows of a phase, as `[times, actions, stage]`, are what one scan without a branch runs over. Without a
    flush a phase ends where the next batch reaches the model's first or last chunk: what is outside of the stages is
    computed for one batch at a time.
    """
    ends = [table.chunks.home(logical)[0] for logical in (0, table.chunks.total - 1)]
    ticks = [
        (Action(int(action)), *age) for action, age in zip(table.action.max(axis=1), ages(table)[:, ends], strict=True)
    ]
    found: list[Phase] = []
    start = 0
    while start < len(ticks):
        loops = (_loop(ticks, start, length) for length in range(1, LONGEST + 1))
        length, times = max(loops, key=lambda loop: loop[0] * loop[1] * (loop[1] > 1))
        found.append(Phase(start, tuple(action for action, *_ in ticks[start : start + length]), times))
        start += length * times
    return found


def _loop(ticks: Sequence[tuple], start: int, length: int) -> tuple[int, int]:
    """How many ticks the next `length` are, and how often they repeat."""
    body = ticks[start : start + length]
    times = 1
    while ticks[start + times * length : start + (times + 1) * length] == body:
        times += 1
    return len(body), times
