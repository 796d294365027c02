"""A run's curves, `loss.png` and `experts.png`, drawn from the records of `metrics.jsonl`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from axon.disk import writing
from axon.errors import UserError

_TRAIN, _EVALUATION, _INK, _GRID = "#3b6fb6", "#d1495b", "#3c4043", "#e3e5e8"


def plot_loss(records: Sequence[dict[str, Any]], path: str | Path, unit: str, title: str = "") -> None:
    """Draws training loss (each step faint, smoothed over it) and evaluations against steps into a PNG at `path`.

    Left axis: nats per `unit`. Right axis, where there are evaluations: bits per byte, at the held-out
    text's own ratio of bytes to tokens. Raises `UserError` if no record has a loss.
    """
    train, evaluation = series(records, "loss"), series(records, "eval_loss")
    if not len(train[0]) + len(evaluation[0]):
        raise UserError("nothing to plot: no record of the metrics has a finite loss")
    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training(axes, *train)
    _draw_evaluations(axes, *evaluation)
    _style(axes, title, unit)
    bits = series(records, "eval_bits_per_byte")[1]
    if len(bits) and len(bits) == len(evaluation[1]):
        _bits_axis(axes, float(np.median(bits / evaluation[1])))
    with writing(path):
        figure.savefig(path)


EXPERTS = {
    "expert_load": "largest load / mean",
    "expert_dropped": "share of choices dropped",
    "router_entropy": "router's entropy (nats)",
}
"""Metric of a mixture of experts → what its axis says."""


def plot_experts(records: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draws the load of experts, the share of dropped choices and the router's entropy against steps into a PNG at
    `path`; nothing where no record has them, as those of a dense model."""
    found = {name: series(records, name) for name in EXPERTS}
    if not any(len(steps) for steps, _ in found.values()):
        return
    figure = Figure(figsize=(7.2, 6.0), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (name, (steps, values)) in zip(figure.subplots(len(EXPERTS), sharex=True), found.items(), strict=True):
        axes.plot(steps, values, color=_TRAIN, linewidth=1.2)
        axes.set_ylabel(EXPERTS[name], color=_INK, fontsize=9)
        axes.grid(True, color=_GRID, linewidth=0.8)
        axes.tick_params(colors=_INK, length=0)
    figure.axes[-1].set_xlabel("step", color=_INK)
    with writing(path):
        figure.savefig(path)


def series(records: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have a finite number under `name`."""
    found = [
        (record["step"], record[name])
        for record in records
        if record.get("step") is not None and record.get(name) is not None and np.isfinite(record[name])
    ]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.asarray(steps, float), np.asarray(values, float)


def _draw_training(axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    if len(steps):
        axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smoothed(losses), color=_TRAIN, linewidth=1.8, label="training, smoothed")


def _draw_evaluations(axes: Axes, steps: np.ndarray, losses: np.ndarray) -> None:
    if not len(steps):
        return
    axes.plot(steps, losses, color=_EVALUATION, linewidth=1, alpha=0.5)
    axes.plot(steps, losses, "o", color=_EVALUATION, markersize=5, markeredgecolor="white", label="held-out")
    axes.annotate(
        f"{losses[-1]:.3f}",
        (float(steps[-1]), float(losses[-1])),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        color=_EVALUATION,
        fontsize=9,
    )


def smoothed(values: np.ndarray, share: float = 0.03) -> np.ndarray:
    """Each value's mean with its neighbours: a centred window of `share` of all.

    Near the start, where the curve is steep, the window narrows on both sides, or the mean would lag; near the end,
    where it is flat, on the right only, or the mean would be noisy.
    """
    half = max(1, round(len(values) * share / 2))
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(half, at)
    end = np.minimum(at + reach + 1, len(values))
    return (total[end] - total[at - reach]) / (end - at + reach)


def _style(axes: Axes, title: str, unit: str) -> None:
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(f"loss (nats per {unit})", color=_INK)
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.tick_params(colors=_INK, length=0)
    axes.margins(x=0.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.legend(frameon=False, labelcolor=_INK, loc="upper right")


def _bits_axis(axes: Axes, bits_per_nat: float) -> None:
    to_bits, to_nats = (lambda y: np.asarray(y) * bits_per_nat), (lambda y: np.asarray(y) / bits_per_nat)
    right = axes.secondary_yaxis("right", functions=(to_bits, to_nats))
    right.set_ylabel("bits per byte", color=_INK)
    right.tick_params(colors=_INK, length=0)
    right.spines["right"].set_visible(False)
