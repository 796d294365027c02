"""Scaling as a picture: tokens, where a step's time is lost, and what failures leave of it."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from axon.disk import output, writing
from axon.plan.predict.seconds import BUBBLE, COMMUNICATION
from axon.plan.search.scaling import Point, Scaling
from axon.show.plan_picture import COLOURS, FAINT, INK
from axon.show.scaling import duration

KINDS = {"weak": COLOURS[0], "strong": COLOURS[1]}


def draw_scaling(found: Scaling, title: str, path: Path) -> None:
    """Draw tokens a second, the shares of a step that are bubble and exposed communication, and the goodput, over the
    devices of the machines.

    Raises `UserError` for a file that is no `.png` or `.svg`, or cannot be written.
    """
    path = output(path, "--draw", ".png", ".svg")
    figure = Figure(figsize=(13.5, 4.4), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    rate, lost, goodput = figure.subplots(1, 3)
    for kind, points in (("weak", found.weak), ("strong", found.strong)):
        planned = [one for one in points if one.plan]
        _rates(rate, planned, kind)
        _losses(lost, planned, kind)
    _goodput(goodput, found.weak)
    lost.set_ylim(0.0, max(1.0, lost.get_ylim()[1]))
    for axes, label in ((rate, "tokens a second"), (lost, "share of a step, %"), (goodput, "goodput, %")):
        _style(axes, label, [one.target.devices for one in found.weak])
    figure.suptitle(title, color=INK, fontsize=11)
    with writing(path):
        figure.savefig(path)


def _rates(axes: Axes, points: Sequence[Point], kind: str) -> None:
    """Tokens a second while it trains, dotted in the long run, and in grey as on the smallest machine."""
    counts = [one.target.devices for one in points]
    axes.plot(counts, [one.tokens_per_second for one in points], "o-", color=KINDS[kind], label=kind, markersize=4)
    trained = [one.trained_per_second for one in points]
    axes.plot(counts, trained, ":", color=KINDS[kind], label=f"{kind}, with failures")
    axes.set_yscale("log")
    if points and kind == "weak":
        each = points[0].tokens_per_second / counts[0]
        axes.plot(counts, [each * count for count in counts], color=FAINT, linewidth=0.8, label="as on the smallest")


def _losses(axes: Axes, points: Sequence[Point], kind: str) -> None:
    counts = [one.target.devices for one in points]
    for name, lines, style in (("bubble", {BUBBLE}, "s--"), ("exposed communication", COMMUNICATION, "o-")):
        shares = [100 * one.plan.seconds.of(*lines) / one.plan.seconds.total for one in points if one.plan]
        axes.plot(counts, shares, style, color=KINDS[kind], label=f"{kind}: {name}", markersize=4)


def _goodput(axes: Axes, points: Sequence[Point]) -> None:
    """The expected share of the time that trains, and beside each point the interval between checkpoints."""
    counts = [one.target.devices for one in points]
    axes.plot(counts, [100 * one.goodput for one in points], "o-", color=COLOURS[4], markersize=4, label="goodput")
    for one in points[:: max(1, len(points) // 5)]:
        about = f"saved every {duration(one.interval)}"
        where = (one.target.devices, 100 * one.goodput)
        axes.annotate(about, where, xytext=(4, 6), textcoords="offset points", fontsize=7, color=INK)
    axes.margins(x=0.3, y=0.1)


def _style(axes: Axes, label: str, counts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45)
    axes.set_xlabel("devices", color=INK, fontsize=9)
    axes.set_ylabel(label, color=INK, fontsize=9)
    axes.tick_params(which="both", labelsize=8, colors=INK)
    axes.legend(fontsize=7.5, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
