"""A uniform table as loops: the same few actions many times over."""

from typing import NamedTuple

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

    The table's rows of a phase, as `[times, actions, stage]`, are what one scan without a branch runs over.
    """
    ticks = [Action(int(action)) for action in table.action.max(axis=1)]
    found: list[Phase] = []
    start = 0
    while start < len(ticks):
        loops = (_loop(ticks, start, length) for length in range(1, LONGEST + 1))
        phase = max(loops, key=lambda loop: len(loop.actions) * loop.times * (loop.times > 1))
        found.append(phase)
        start += len(phase.actions) * phase.times
    return found


def _loop(ticks: list[Action], start: int, length: int) -> Phase:
    """How often the next `length` ticks repeat."""
    body = ticks[start : start + length]
    times = 1
    while ticks[start + times * length : start + (times + 1) * length] == body:
        times += 1
    return Phase(start, tuple(body), times)
