"""Plans as a picture: of each what a device's memory and a step's seconds are made of."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from axon.disk import output, writing
from axon.plan.predict.memory import GIB
from axon.plan.search import Plan
from axon.show.planning import Plans

INK, FAINT = "#202124", "#80868b"
COLOURS = (
    "#4f97dd",
    "#da6832",
    "#f2cf3f",
    "#8f8f95",
    "#5aa469",
    "#a8cff2",
    "#eea07c",
    "#6b5ca5",
    "#c3447a",
    "#cbcbcb",
    "#2f6f73",
    "#f9eca8",
    "#9c6b4a",
    "#7fc7c2",
    "#e8a5c4",
    "#3f4a6b",
    "#b9d38a",
)
"""Of the parts of a bar, in the order in which the plans first have them: as many as a step has lines."""


def draw_plans(found: Plans, path: Path) -> None:
    """Draw a bar for each plan, the best on top: GiB of a device, and exposed seconds of a step.

    Raises `UserError` for a file that is no `.png` or `.svg`, or cannot be written.
    """
    path, plans = output(path, "--draw", ".png", ".svg"), found.plans
    figure = Figure(figsize=(11.0, 1.9 + 1.1 * len(plans)), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [f"{number}: {_name(plan)}" for number, plan in enumerate(plans, 1)]
    _bars(left, names, [{name: size / GIB for name, size in plan.memory.parts.items()} for plan in plans])
    left.axvline(found.target.chip.memory / GIB, color=INK, linewidth=1.2, linestyle="--")
    left.set_xlabel("GiB of a device; dashed: all of its memory", color=INK, fontsize=9)
    _bars(right, names, [{line.name: line.exposed for line in plan.seconds.lines if line.exposed} for plan in plans])
    right.set_xlabel("seconds of a step, without what is hidden behind work", color=INK, fontsize=9)
    left.invert_yaxis()
    title = f"{found.question.config} on {found.target.name}, predicted"
    figure.suptitle(title, color=INK, fontsize=11)
    with writing(path):
        figure.savefig(path)


def _name(plan: Plan) -> str:
    """In two lines: the mesh; what else differs."""
    layout = plan.layout
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    schedule = f", {layout.schedule!r}".removesuffix("()") if layout.schedule else ""
    return f"{mesh}\nZeRO {layout.zero}, {layout.microbatches} microbatches{schedule}"


def _bars(axes: Axes, names: Sequence[str], bars: Sequence[Mapping[str, float]]) -> None:
    """A stacked bar for each name."""
    begin = [0.0] * len(bars)
    for part, colour in zip(dict.fromkeys(name for bar in bars for name in bar), COLOURS, strict=False):
        sizes = [bar.get(part, 0.0) for bar in bars]
        axes.barh(names, sizes, left=begin, color=colour, label=part, height=0.62, edgecolor="white", linewidth=0.6)
        begin = [at + size for at, size in zip(begin, sizes, strict=True)]
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=2, fontsize=7.5, frameon=False)
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
