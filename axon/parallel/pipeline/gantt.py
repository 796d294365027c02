"""A schedule's picture as text: a row a stage, time to the right."""

from collections.abc import Callable

import numpy as np

from axon.parallel.pipeline.figures import Costs, figures, timed
from axon.parallel.pipeline.periodic import unrolled
from axon.parallel.pipeline.rows import SlotBytes
from axon.parallel.pipeline.table import LETTERS, Table, Work
from axon.parallel.pipeline.timeline import Timed

LEGEND = "F3 forward of microbatch 3, B3 backward, I3 of inputs, W3 of weights; F3/1 by the stage's chunk 1"
SHORT = "F forward, B backward, I of inputs, W of weights; microbatches have no room"

LEAST = 24
"""Letters of time that are drawn, however narrow the text may be."""


def gantt(
    table: Table, costs: Costs = Costs(), width: int = 160, most: int = 20, slot_bytes: SlotBytes | None = None
) -> str:
    """Each stage's work in time, with its `summary`.

    Idle time is `·`. A table with uniform ticks is drawn in lockstep. Without a flush there are two batches.

    Args:
        width: letters in a line. most: stages that are drawn. Where there is more of either, the middle is left out,
            and a line below says which. slot_bytes: see `summary`.
    """
    stages = list(range(table.stages))
    if len(stages) > most:
        stages = [*stages[: most - 1], stages[-1]]
    words = summary(table, costs, slot_bytes)
    columns = [[f"stage {stage}" for stage in stages], *zip(*(words[stage] for stage in stages), strict=True)]
    columns = [_padded(column) for column in columns]
    pieces = placed(table if table.flush else unrolled(table, 2), costs)
    room = max(LEAST, width - sum(1 + len(column[0]) for column in columns))
    time, legend, left_out = _drawn(pieces, stages, room)
    lines = [" ".join(cells) for cells in zip(columns[0], time, *columns[1:], strict=True)]
    if len(stages) < table.stages:
        lines.insert(len(lines) - 1, "⋮")
        left_out.append(f"stages {stages[-2] + 1} to {table.stages - 2}")
    notes = [f"left out: {', '.join(left_out)}"] if left_out else []
    return "\n".join([*lines, legend, *notes, ""])


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


def summary(table: Table, costs: Costs, slot_bytes: SlotBytes | None = None) -> list[tuple[str, ...]]:
    """Of each stage its bubble, its peak stash in microbatches, and the memory of what it keeps of chunks, in words.

    Args:
        slot_bytes: of what waits of one chunk; without, nothing is said of memory.
    """
    found = figures(table, costs)
    time = found.lockstep if table.uniform else found.time
    bubbles = [f"bubble {bubble:.1%}" for bubble in time / found.busy - 1]
    stashes = [f"peak stash {count:g}" for count in found.stash / table.chunks.virtual]
    if slot_bytes is None:
        return list(zip(bubbles, stashes, strict=True))
    memory = [f"{mib(size)} kept" for size in slot_bytes.of_stages(table)]
    if slot_bytes.offloaded:
        hosts = slot_bytes.on_host(table)
        memory = [f"{kept}, {mib(size)} by the host" for kept, size in zip(memory, hosts, strict=True)]
    return list(zip(bubbles, stashes, memory, strict=True))


def mib(size: float) -> str:
    """Bytes in binary units, to three digits: 1.25 MiB."""
    size /= 2**20
    return f"{size:.3g} MiB" if size < 1000 else f"{size:,.0f} MiB"


def _drawn(pieces: list[Timed], stages: list[int], room: int) -> tuple[list[str], str, list[str]]:
    """Of each stage its time in so many letters, what letters mean, and what is left out.

    Without room for microbatches the letters of the actions do; if that is too long, the beginning and the end.
    """
    lines, letters = _written(pieces, stages, str)
    if len(lines[0]) <= room:
        return lines, LEGEND, []
    lines, letters = _written(pieces, stages, lambda work: LETTERS[work.action])
    length = len(lines[0])
    if length <= room:
        return lines, SHORT, []
    head, tail = room // 2, room - room // 2 - 3
    left_out = f"time {head / letters:.0f} to {(length - tail) / letters:.0f} of {length / letters:.0f}"
    return [f"{line[:head]} … {line[length - tail :]}" for line in lines], SHORT, [left_out]


def _written(pieces: list[Timed], stages: list[int], name: Callable[[Work], str]) -> tuple[list[str], float]:
    """Of each stage its time in letters, enough to write all pieces by name, and how many letters a unit has."""
    names = [" ".join(map(name, one.piece)) for one in pieces]
    widest = max(map(len, names))
    scale = (widest + (widest > 1)) / min(one.end - one.start for one in pieces)
    length = round(max(one.end for one in pieces) * scale)
    rows = {stage: ["·"] * length for stage in stages}
    for one, text in zip(pieces, names, strict=True):
        if one.stage in rows:
            start, end = round(one.start * scale), round(one.end * scale)
            rows[one.stage][start:end] = text.ljust(end - start, " " if widest > 1 else "-")[: end - start]
    return ["".join(rows[stage]) for stage in stages], scale


def _padded(column: list[str] | tuple[str, ...]) -> list[str]:
    widest = max(map(len, column))
    return [cell.ljust(widest) for cell in column]
