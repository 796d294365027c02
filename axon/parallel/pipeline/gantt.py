"""A schedule's picture as text: a row a stage, time to the right."""

import numpy as np

from axon.parallel.pipeline.figures import Costs, figures, timed
from axon.parallel.pipeline.periodic import unrolled
from axon.parallel.pipeline.table import Table
from axon.parallel.pipeline.timeline import Timed

LEGEND = "F3 forward of microbatch 3, B3 backward, I3 of inputs, W3 of weights; F3/1 by the stage's chunk 1"


def gantt(table: Table, costs: Costs = Costs(), width: int = 160) -> str:
    """Each stage's work in time, its bubble, and its peak stash in microbatches; at most `width` letters of time.

    Idle time is `·`. A table with uniform ticks is drawn in lockstep. Without a flush there are two batches.
    """
    drawn = table if table.flush else unrolled(table, 2)
    pieces = placed(drawn, costs)
    letters = 1 + max(len(_label(one)) for one in pieces)
    scale = letters / min(one.end - one.start for one in pieces)
    length = round(max(one.end for one in pieces) * scale)
    rows = [["·"] * length for _ in range(table.stages)]
    for one in pieces:
        start, end = round(one.start * scale), round(one.end * scale)
        rows[one.stage][start:end] = _label(one).ljust(end - start)[: end - start]
    lines = ["".join(row) for row in rows]
    if length > width:
        lines = [f"{line[:width]}…" for line in lines]
    return "\n".join([*map(" ".join, zip(*_columns(table, lines, costs), strict=True)), LEGEND, ""])


def placed(table: Table, costs: Costs) -> list[Timed]:
    """Where cells are drawn in time: in lockstep if ticks are uniform, else each as early as it can."""
    if not table.uniform:
        return timed(table, costs)
    tick = costs.of_actions(table.chunks.virtual)[table.action].max(axis=1)
    ends = np.cumsum(tick)
    return [
        Timed(float(ends[cell.tick] - tick[cell.tick]), float(ends[cell.tick]), cell.stage, (cell.work,))
        for cell in table.cells()
    ]


def summary(table: Table, costs: Costs) -> list[tuple[str, str]]:
    """Of each stage its bubble and its peak stash, in words."""
    found = figures(table, costs)
    time = found.lockstep if table.uniform else found.time
    bubbles, stashes = time / found.busy - 1, found.stash / table.chunks.virtual
    return [(f"bubble {bubble:.1%}", f"peak stash {count:g}") for bubble, count in zip(bubbles, stashes, strict=True)]


def _columns(table: Table, lines: list[str], costs: Costs) -> list[list[str]]:
    names = [f"stage {stage}" for stage in range(table.stages)]
    columns = [names, lines, *zip(*summary(table, costs), strict=True)]
    return [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]


def _label(one: Timed) -> str:
    return " ".join(map(str, one.piece))
