"""A schedule's picture: `axon show --draw` for a pipeline."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from axon.disk import writing
from axon.errors import UserError
from axon.parallel.pipeline.figures import Costs
from axon.parallel.pipeline.gantt import placed, summary
from axon.parallel.pipeline.periodic import unrolled
from axon.parallel.pipeline.table import Action, Table, Work

INK, FAINT, IDLE = "#3c4043", "#80868b", "#f1f3f4"
COLOURS = {
    Action.FORWARD: ("forward", ("#7aa5dc", "#b9d0ee", "#5d8bc6", "#d6e3f5")),
    Action.BACKWARD: ("backward", ("#e08a96", "#f2c0c7", "#cf6c7b", "#f8dde1")),
    Action.BACKWARD_INPUT: ("backward, inputs", ("#eba15c", "#f7d3ac", "#d98a40", "#fbe7d2")),
    Action.BACKWARD_WEIGHT: ("backward, weights", ("#8cbf83", "#c8e2c2", "#6fa866", "#e0f0dd")),
}
"""Of each action its name, and its colours for a stage's chunks."""


def draw(table: Table, path: Path, costs: Costs = Costs(), title: str = "") -> None:
    """Draw a schedule as a Gantt chart, with each stage's bubble, and its peak stash in microbatches.

    Args:
        path: of the file; its suffix says the format. costs: in any unit of time, which is that of the picture.

    Raises `UserError` for a format that does not exist.
    """
    figure = Figure(figsize=(14, 1.3 + 0.36 * table.stages), dpi=120, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    if path.suffix.removeprefix(".") not in canvas.get_supported_filetypes():
        raise UserError(f"unsupported image format {path.suffix!r} of {str(path)!r}; write FILE.png, .svg or .pdf")
    axes = figure.add_subplot()
    _draw_work(axes, table, costs)
    _dress(axes, table, costs, title)
    figure.legend(handles=_marks(table), frameon=False, labelcolor=INK, fontsize=8, loc="outside lower left", ncols=8)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _draw_work(axes: Axes, table: Table, costs: Costs) -> None:
    pieces = placed(table if table.flush else unrolled(table, 2), costs)
    end = max(one.end for one in pieces)
    for stage in range(table.stages):
        axes.add_patch(Rectangle((0, stage - 0.44), end, 0.88, facecolor=IDLE, edgecolor="none"))
    for one in pieces:
        width = (one.end - one.start) / len(one.piece)
        for number, work in enumerate(one.piece):
            _draw_box(axes, one.start + number * width, one.stage, width, work, room=950 * width / end)
    axes.set_xlim(0, end)
    axes.set_ylim(table.stages - 0.5, -0.5)


def _draw_box(axes: Axes, start: float, stage: int, width: float, work: Work, room: float) -> None:
    """A box with its microbatch's number, if there is room for two digits in so many points."""
    _, colours = COLOURS[work.action]
    box = Rectangle((start, stage - 0.44), width, 0.88, facecolor=colours[work.chunk % len(colours)])
    box.set(edgecolor="white", linewidth=min(1, room / 12))
    axes.add_patch(box)
    if room > 6:
        size = min(9, 0.75 * room)
        axes.text(start + width / 2, stage, str(work.microbatch), color=INK, fontsize=size, ha="center", va="center")


def _dress(axes: Axes, table: Table, costs: Costs, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_yticks(range(table.stages), [f"stage {stage}" for stage in range(table.stages)], color=INK)
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=FAINT, length=0, labelsize=9)
    for stage, words in enumerate(summary(table, costs)):
        where = (1.01, stage)
        axes.annotate("   ".join(words), where, xycoords=axes.get_yaxis_transform(), va="center", color=INK, fontsize=9)


def _marks(table: Table) -> list[Patch]:
    """What the colours in the picture mean."""
    marks = []
    for action, (name, colours) in COLOURS.items():
        for chunk in range(min(table.chunks.virtual, len(colours))):
            if np.any((table.action == action) & (table.chunk % len(colours) == chunk)):
                part = f", chunk {chunk}" if table.chunks.virtual > 1 else ""
                marks.append(Patch(facecolor=colours[chunk], label=name + part))
    return marks
