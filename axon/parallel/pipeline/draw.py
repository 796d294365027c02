"""A schedule's picture: `axon show --draw` for a pipeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

from axon.disk import writing
from axon.errors import UserError
from axon.parallel.pipeline.figures import Costs
from axon.parallel.pipeline.gantt import placed, summary
from axon.parallel.pipeline.periodic import unrolled
from axon.parallel.pipeline.rows import SlotBytes
from axon.parallel.pipeline.table import Action, Table, Work
from axon.parallel.pipeline.timeline import Timed

INK, FAINT, IDLE = "#202124", "#80868b", "#f1f3f4"
COLOURS = {
    Action.FORWARD: ("forward", ("#4f97dd", "#a8cff2", "#7cb3e9", "#d3e6f9")),
    Action.BACKWARD: ("backward", ("#da6832", "#eea07c", "#e48657", "#f8d2bf")),
    Action.BACKWARD_INPUT: ("backward, inputs", ("#f2cf3f", "#f9eca8", "#f5dc74", "#fdf6d8")),
    Action.BACKWARD_WEIGHT: ("backward, weights", ("#8f8f95", "#cbcbcb", "#adadb1", "#e0e0e2")),
}
"""Of each action its name, and its colours for a stage's chunks: told apart without red and green, or without blue."""

WIDTH = 14.0
"""Of a figure, in inches."""


class Panel(NamedTuple):
    """A table in a picture of several. `slot_bytes`: as of `summary`."""

    title: str
    table: Table
    slot_bytes: SlotBytes | None = None


def before_and_after(name: str, own: Table, running: Table, slot_bytes: SlotBytes | None = None) -> list[Panel]:
    """A schedule's own table, and below it what `lockstep` makes of it."""
    batches = "" if own.flush else ": two batches"
    return [
        Panel(f"{name}, each stage by itself{batches}", own, slot_bytes),
        Panel(f"{name} in lockstep{batches or ': what runs'}", running, slot_bytes),
    ]


def draw(panels: Sequence[Panel], path: Path, costs: Costs = Costs()) -> None:
    """Draw schedules as Gantt charts, one below the other on the same axis of time, with each stage's `summary`.

    Args:
        path: of the file; its suffix says the format. costs: in any unit of time, which is that of the picture.

    Raises `UserError` for a format that does not exist.
    """
    row = 0.34 if max(panel.table.stages for panel in panels) <= 16 else 0.2  # inches
    heights = [0.45 + row * panel.table.stages for panel in panels]
    figure = Figure(figsize=(WIDTH, 0.45 + sum(heights)), dpi=100, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    if path.suffix.removeprefix(".").lower() not in canvas.get_supported_filetypes():
        raise UserError(f"unsupported image format {path.suffix!r} of {str(path)!r}; write FILE.png, .svg or .pdf")
    pieces = [placed(_whole(panel.table), costs) for panel in panels]
    end = max(one.end for own in pieces for one in own)
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel, own in zip(every, panels, pieces, strict=True):
        _draw_work(axes, panel.table.stages, own, end)
        _dress(axes, panel, costs)
    _explain(figure, [panel.table for panel in panels])
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _whole(table: Table) -> Table:
    """Without a flush two batches, to see how one runs into the next."""
    return table if table.flush else unrolled(table, 2)


def _draw_work(axes: Axes, stages: int, pieces: Sequence[Timed], end: float) -> None:
    last = max(one.end for one in pieces)
    digits = max(len(str(work.microbatch)) for one in pieces for work in one.piece)
    for stage in range(stages):
        axes.add_patch(Rectangle((0, stage - 0.44), last, 0.88, facecolor=IDLE, edgecolor="none"))
    for one in pieces:
        width = (one.end - one.start) / len(one.piece)
        for number, work in enumerate(one.piece):
            _draw_box(axes, one.start + number * width, one.stage, width, work, room=780 * width / end / digits)
    axes.set_xlim(0, end)
    axes.set_ylim(stages - 0.5, -0.5)


def _draw_box(axes: Axes, start: float, stage: int, width: float, work: Work, room: float) -> None:
    """A box with its microbatch's number, if each digit has room enough, in points."""
    _, colours = COLOURS[work.action]
    box = Rectangle((start, stage - 0.44), width, 0.88, facecolor=colours[work.chunk % len(colours)])
    box.set(edgecolor="white", linewidth=min(1, room / 6))
    axes.add_patch(box)
    size = min(9, 1.4 * room)
    if size >= 5.5:
        text = str(work.microbatch)
        axes.text(start + width / 2, stage, text, color=INK, fontsize=size, ha="center", va="center")


def _dress(axes: Axes, panel: Panel, costs: Costs) -> None:
    stages = panel.table.stages
    axes.set_title(panel.title, loc="left", fontsize=11, color=INK)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], color=INK)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    for stage, words in enumerate(summary(panel.table, costs, panel.slot_bytes)):
        where = (1.01, stage)
        axes.annotate("   ".join(words), where, xycoords=axes.get_yaxis_transform(), va="center", color=INK, fontsize=9)


def _explain(figure: Figure, tables: Sequence[Table]) -> None:
    """The legend: one entry an action, with the colours of its chunks side by side."""
    marks = _marks(tables)
    handles: list[Any] = list(marks.values())
    side_by_side = {tuple: HandlerTuple(ndivide=None, pad=0)}
    style = {"frameon": False, "labelcolor": INK, "fontsize": 9, "handlelength": 3.0, "ncols": len(marks)}
    figure.legend(handles, list(marks), loc="outside lower left", handler_map=side_by_side, **style)


def _marks(tables: Sequence[Table]) -> dict[str, tuple[Patch, ...]]:
    """What the colours in the picture mean: of each action those of its chunks."""
    marks = {}
    virtual = max(table.chunks.virtual for table in tables)
    chunks = f", chunks 0 {'to' if virtual > 2 else 'and'} {virtual - 1}" if virtual > 1 else ""
    for action, (name, colours) in COLOURS.items():
        if any(np.any(table.action == action) for table in tables):
            marks[name + chunks] = tuple(Patch(facecolor=colour) for colour in colours[:virtual])
    return marks | {"idle": (Patch(facecolor=IDLE),)}
