"""Tables without a flush: one period of a schedule in which each batch is finished while the next one runs."""

import numpy as np

from axon.parallel.pipeline.chunks import Chunks
from axon.parallel.pipeline.table import Action, Cell, Step, Table, needs, result, step_of


def ages(table: Table) -> np.ndarray:
    """`[tick, stage]`: of which batch a cell's microbatch is, counted back from the one that begins in this period.

    0 everywhere for a table with a flush. 1 is the batch that began a period ago; it is computed with the weights of
    that time, which are one version old.
    """
    found = np.zeros_like(table.action)
    if table.flush:
        return found
    cells = {result(step_of(cell.stage, cell.work, table.chunks)): cell for cell in table.cells()}
    starts: dict[Step, int] = {}
    for step in _in_order(table.microbatches, table.chunks, table.split):
        if cell := cells.get(step):
            after = max((starts[need] + 1 for need in needs(step, table.chunks) if need in starts), default=cell.tick)
            age = max(0, -(-(after - cell.tick) // table.ticks))
            starts[step] = cell.tick + age * table.ticks
            found[cell.tick, cell.stage] = age
    return found


def _in_order(microbatches: int, chunks: Chunks, split: bool) -> list[Step]:
    """All results of a batch, each after what it needs."""
    down, up = range(chunks.total), range(chunks.total - 1, -1, -1)
    kinds = [(Action.FORWARD, down), (Action.BACKWARD_INPUT, up), *([(Action.BACKWARD_WEIGHT, up)] if split else [])]
    return [Step(kind, i, logical) for kind, depths in kinds for i in range(microbatches) for logical in depths]


def unrolled(table: Table, periods: int) -> Table:
    """`periods` batches one after another, from an empty pipeline to an empty one; for a flush, `periods` tables.

    Microbatches are numbered through.
    """
    age = ages(table)
    cells = []
    for period in range(periods + int(age.max())):
        for tick, stage, work in table.cells():
            batch = period - int(age[tick, stage])
            if 0 <= batch < periods:
                numbered = work._replace(microbatch=work.microbatch + batch * table.microbatches)
                cells.append(Cell(tick + period * table.ticks, stage, numbered))
    return Table.of(cells, table.microbatches * periods, table.chunks)
