"""Proof that a schedule can be run: each rule by itself, and a message that says where one is broken."""

from collections.abc import Iterator

import numpy as np

from axon.errors import UserError
from axon.fields import field_values
from axon.parallel.pipeline.chunks import PLACEMENTS
from axon.parallel.pipeline.periodic import ages
from axon.parallel.pipeline.replay import replay
from axon.parallel.pipeline.slots import Slots, slots
from axon.parallel.pipeline.table import Action, Cell, Table, Work, needs, result, step_of


def check(table: Table, memory: Slots | None = None) -> None:
    """Raise `UserError`, with tick, stage and why, unless a schedule is right. Rules, in this order:

    - arrays have one shape, and what is in them exists;
    - each microbatch goes forward once through each chunk, and backward once, whole or in two parts;
    - nothing is used before the tick after the one in which it is made;
    - without a flush, nothing is in flight for longer than one batch after its own;
    - with the table's `slots`, or with `memory`, all work finds its inputs and no slot is written that is still needed.
    """
    _check_arrays(table)
    _check_counts(table)
    if table.flush:
        _check_order(table)
    else:
        _check_versions(table)
    replay(table, slots(table) if memory is None else memory)


def _check_arrays(table: Table) -> None:
    chunks = table.chunks
    if chunks.placement not in PLACEMENTS:
        raise UserError(f"unknown placement {chunks.placement!r}; known: {', '.join(PLACEMENTS)}")
    if min(chunks.stages, chunks.virtual, table.microbatches) < 1:
        raise UserError(
            f"a schedule needs at least one stage, chunk and microbatch; "
            f"got {chunks.stages}, {chunks.virtual}, {table.microbatches}"
        )
    limits = {"action": len(Action), "microbatch": table.microbatches, "chunk": chunks.virtual}
    for name, array in field_values(table, limits).items():
        limit = limits[name]
        if array.dtype.kind != "i" or array.ndim != 2 or array.shape != (len(table.action), chunks.stages):
            raise UserError(
                f"the schedule's array {name!r} is {array.dtype} {list(array.shape)}; must be of integers, "
                f"ticks × stages: {[len(table.action), chunks.stages]}"
            )
        for tick, stage in np.argwhere((array < 0) | (array >= limit)).tolist():
            raise UserError(f"{_at(tick, stage)}: {name} {array[tick, stage]} does not exist; must be in [0, {limit})")


def _check_counts(table: Table) -> None:
    """Every chunk takes each microbatch forward once and backward once."""
    seen: dict[tuple[int, Work], int] = {}
    for tick, stage, work in table.cells():
        for part in _parts(work):
            if (stage, part) in seen:
                first = seen[stage, part]
                raise UserError(f"{_at(tick, stage)}: {work} repeats what the stage does in tick {first} already")
            seen[stage, part] = tick
    for stage in range(table.stages):
        for part in _all_parts(table):
            if (stage, part) not in seen:
                weights = part._replace(action=Action.BACKWARD_WEIGHT)
                whole = part.action == Action.BACKWARD_INPUT and (stage, weights) not in seen
                lacking = part._replace(action=Action.BACKWARD) if whole else part
                raise UserError(
                    f"stage {stage} never does {lacking}: every chunk takes each microbatch forward (F) and backward "
                    f"(B, or both I and W); this one is missing up to the last tick, {table.ticks - 1}"
                )


def _parts(work: Work) -> list[Work]:
    if work.action != Action.BACKWARD:
        return [work]
    return [work._replace(action=part) for part in (Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)]


def _all_parts(table: Table) -> Iterator[Work]:
    for action in (Action.FORWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT):
        for microbatch in range(table.microbatches):
            for chunk in range(table.chunks.virtual):
                yield Work(action, microbatch, chunk)


def _check_order(table: Table) -> None:
    made = {result(step_of(cell.stage, cell.work, table.chunks)): cell for cell in table.cells()}
    for cell in table.cells():
        for need in needs(step_of(cell.stage, cell.work, table.chunks), table.chunks):
            _check_made(cell, made[need])


def _check_made(cell: Cell, source: Cell) -> None:
    if source.tick >= cell.tick:
        raise UserError(
            f"{_at(cell.tick, cell.stage)}: {cell.work} needs {source.work} of stage {source.stage}, which that stage "
            f"does in tick {source.tick}; it can be used from tick {source.tick + 1} on"
        )


def _check_versions(table: Table) -> None:
    """Without a flush, order is a matter of how long things are in flight."""
    for tick, stage in np.argwhere(ages(table) > 1).tolist():
        raise UserError(
            f"{_at(tick, stage)}: {table.work(tick, stage)} can be no earlier than two batches after its own, with "
            f"weights two versions old. Use more microbatches, or another order"
        )


def _at(tick: int, stage: int) -> str:
    return f"tick {tick}, stage {stage}"
