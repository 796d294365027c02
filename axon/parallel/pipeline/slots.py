"""Where values wait between ticks: which slot of a stage's memory each is written to, and which stage it goes to."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from axon.errors import UserError
from axon.parallel.pipeline.periodic import ages
from axon.parallel.pipeline.table import Action, Step, Table, step_of

NONE = -1
"""In place of a slot: there is nothing to read or write."""

SHIFTS = (1, -1, 0)
"""How far results travel, in stages, around the circle: down, up, or to another chunk of the same stage."""


@dataclass(frozen=True, eq=False)
class Slots:
    """Two pools of equal slots on each stage: inputs of chunks, and gradients of their outputs.

    In each tick a stage does its cell's work, and then what arrives is written: a slot that is read in a tick may be
    written at its end. Arrays of ints, `NONE` where there is nothing:

    Attributes:
        input: `[tick, stage]`, the slot of the input that the work reads. The forward of logical chunk 0 writes it,
            since its input is made on the stage.
        gradient: `[tick, stage]`, the slot of the output's gradient that a backward reads. That of the last
            chunk is made on the stage: by a backward of the inputs, which writes it for that of the weights.
        shift: `[tick, stage]`, how far the work's result travels, one of `SHIFTS`; 0 too if nobody needs it.
        input_arrives, gradient_arrives: `[tick, shift, stage]`, the slot that is written with the result of the stage
            `SHIFTS[shift]` before this one (modulo the stages) in this tick.
        inputs, gradients: `[stage]`, how many slots each pool needs. One program for all stages has the most of any.
    """

    input: np.ndarray
    gradient: np.ndarray
    shift: np.ndarray
    input_arrives: np.ndarray
    gradient_arrives: np.ndarray
    inputs: np.ndarray
    gradients: np.ndarray


class _Value(NamedTuple):
    """A value that waits on a stage: from its first tick to the last that reads it, both counted in."""

    first: int
    last: int
    stage: int
    source: Step | None
    """What made it, on whichever stage and in the tick before the first; None: made on the stage, where it is used."""
    users: tuple[Step, ...]


def slots(table: Table) -> Slots:
    """Slots for a table that `check` accepts, as few as there are values at any one time.

    Without a flush slots are the same in every period, which may take a few more.

    Raises:
        UserError: a value waits for longer than a period.
    """
    cells = {step_of(cell.stage, cell.work, table.chunks): cell for cell in table.cells()}
    age = ages(table)
    when = {step: cell.tick + int(age[cell.tick, cell.stage]) * table.ticks for step, cell in cells.items()}
    shape = table.action.shape
    shift = np.zeros(shape, int)
    pools = []
    for values in (_inputs(table, when), _gradients(table, when)):
        used, arrives = np.full(shape, NONE), np.full((shape[0], len(SHIFTS), shape[1]), NONE)
        sizes = np.zeros(table.stages, int)
        for value, slot in _allocated(values, table):
            sizes[value.stage] = max(sizes[value.stage], slot + 1)
            for user in value.users:
                used[cells[user].tick, value.stage] = slot
            if value.source:
                tick, stage, _ = cells[value.source]
                shift[tick, stage] = _distance(stage, value.stage, table.stages)
                arrives[tick, SHIFTS.index(shift[tick, stage]), value.stage] = slot
        pools.append((used, arrives, sizes))
    (inputs, input_arrives, input_sizes), (gradients, gradient_arrives, gradient_sizes) = pools
    return Slots(inputs, gradients, shift, input_arrives, gradient_arrives, input_sizes, gradient_sizes)


def _distance(source: int, target: int, stages: int) -> int:
    if source == target:
        return 0
    return 1 if (source + 1) % stages == target else -1


def _inputs(table: Table, when: dict[Step, int]) -> Iterator[_Value]:
    for step, tick in when.items():
        if step.action == Action.FORWARD:
            source = step._replace(logical=step.logical - 1) if step.logical else None
            yield _value(table, when, source, tick, _uses(step, when, *Action))


def _gradients(table: Table, when: dict[Step, int]) -> Iterator[_Value]:
    backward = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
    for step, tick in when.items():
        last = step.logical == table.chunks.total - 1
        if step.action == Action.BACKWARD_INPUT or (step.action == Action.BACKWARD and not last):
            after = step._replace(logical=step.logical + 1)
            source = None if last else _uses(after, when, *backward[:2])[0]
            yield _value(table, when, source, tick, _uses(step, when, *backward))


def _uses(step: Step, when: dict[Step, int], *actions: Action) -> tuple[Step, ...]:
    """Of the same microbatch and chunk, what is done of these actions."""
    same = (step._replace(action=action) for action in actions)
    return tuple(one for one in same if one in when)


def _value(table: Table, when: dict[Step, int], source: Step | None, tick: int, users: tuple[Step, ...]) -> _Value:
    first = tick if source is None else when[source] + 1
    wait = max(when[user] for user in users) - first
    if not table.flush:
        if wait >= table.ticks:
            raise UserError(f"{users[0]} waits for {wait} ticks, and a period has {table.ticks}: use more microbatches")
        first %= table.ticks
    return _Value(first, first + wait, table.chunks.home(users[0].logical)[0], source, users)


def _allocated(values: Iterable[_Value], table: Table) -> Iterator[tuple[_Value, int]]:
    """A slot for each value."""
    stages: list[list[_Value]] = [[] for _ in range(table.stages)]
    for value in sorted(values, key=lambda one: one.first):
        stages[value.stage].append(value)
    for waiting in stages:
        spans = [(value.first, value.last) for value in waiting]
        yield from zip(waiting, of_spans(spans, table), strict=True)


Span = tuple[int, int]
"""The ticks from which and to which a value waits, both counted in."""


def of_spans(spans: Sequence[Span], table: Table) -> list[int]:
    """Slots of one stage for values that wait so, in the order in which they begin; without a flush in every period."""
    return lowest(spans) if table.flush else _rings(spans, table.ticks)


def lowest(spans: Iterable[Span]) -> list[int]:
    """For values that wait from a tick to another, in the order in which they begin, the lowest slot that is free.

    These are as few as there are values at one time.
    """
    ends: list[int] = []  # tick in which the last value that each slot has had ends
    found = []
    for first, last in spans:
        slot = next((slot for slot, tick in enumerate(ends) if tick < first), len(ends))
        ends[slot : slot + 1] = [last]
        found.append(slot)
    return found


def _rings(spans: Sequence[Span], ticks: int) -> list[int]:
    """The same for values that begin again every so many ticks, and may wait past the end of a period.

    If no value needs its slot any more when the n-th after it begins, slots may be used in turn in rounds of n or more.
    A period has a whole number of rounds, as equal as they can be, so that the next period begins with a new one.
    """
    count = len(spans)
    begins = [first for first, _ in spans] + [first + ticks for first, _ in spans]
    after = max((bisect_right(begins, last) - i for i, (_, last) in enumerate(spans)), default=1)
    return [slot for part in np.array_split(range(count), max(1, count // after)) for slot in range(len(part))]
