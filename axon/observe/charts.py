"""Charts as SVG text, coloured by the page's style sheet: light and dark are the page's business."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 30
STEPS = (1, 2, 2.5, 5, 10)
POINTS = 1200
"""Points of a line at most; of more, each is the mean of its neighbours."""


class Line(NamedTuple):
    """Values against steps. `style` is a class of the style sheet: `a`, `b`, `c`; `faint`; `dots` for single points."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    style: str


class Mark(NamedTuple):
    """Something that happened at a step: a vertical line. `style`: `good`, `warn` or `bad`. `label`: its tooltip."""

    step: float
    kind: str
    label: str
    style: str


def chart(lines: Sequence[Line], marks: Sequence[Mark] = (), from_zero: bool = False, width: int = WIDTH) -> str:
    """Lines against steps, with a legend where there is more than one, or a mark; marks have their text as tooltip."""
    lines = [_thinned(line) for line in lines if len(line.steps)]
    if not lines:
        return '<p class="none">nothing recorded</p>'
    steps, values = np.concatenate([l.steps for l in lines]), np.concatenate([l.values for l in lines])
    x_low, x_high = _spread(steps.min(), steps.max())
    y_low, y_high = _spread(0.0 if from_zero else values.min(), values.max())
    y_high += 0.05 * (y_high - y_low)

    def x(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (width - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [*_grid_y(y_low, y_high, y, width), *_grid_x(x_low, x_high, x, width)]
    marks = [mark for mark in marks if x_low <= mark.step <= x_high]
    parts += [_mark(mark, x(mark.step)) for mark in marks]
    parts += [_drawn(line, x, y) for line in lines]
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {HEIGHT}" role="img">{body}</svg>{_legend(lines, marks)}'


def stacked_bar(parts: Mapping[str, float], total: float) -> str:
    """One bar, its parts by their share of `total`; each is a class of the style sheet by its name."""
    at, drawn = 0.0, []
    for name, value in parts.items():
        width = 100 * value / total if total else 0.0
        title = f"<title>{escape(name)} {width:.1f} %</title>"
        drawn.append(
            f'<rect class="{escape(name)}" x="{at:.3f}%" width="{width:.3f}%" y="0" height="100%">{title}</rect>'
        )
        at += width
    return f'<svg class="bar" role="img">{"".join(drawn)}</svg>'


def _thinned(line: Line) -> Line:
    if len(line.steps) <= POINTS or line.style == "dots":
        return line
    parts = np.array_split(np.arange(len(line.steps)), POINTS)
    means = [np.array([values[part].mean() for part in parts]) for values in (line.steps, line.values)]
    return line._replace(steps=means[0], values=means[1])


def _spread(low: float, high: float) -> tuple[float, float]:
    """The interval, wider where it is empty."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _grid_y(low: float, high: float, y, width: int) -> list[str]:
    text, drawn = EngFormatter(sep=""), []
    for value in MaxNLocator(5, steps=STEPS).tick_values(low, high):
        if low <= value <= high:
            at = y(value)
            shown = f"{value:g}" if abs(value) < 1000 else text(value)
            drawn.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            drawn.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{shown}</text>')
    return drawn


def _grid_x(low: float, high: float, x, width: int) -> list[str]:
    name = f'<text x="{LEFT - 8}" y="{HEIGHT - 8}" text-anchor="end">step</text>'
    return [name] + [
        f'<text x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step:,.0f}</text>'
        for step in MaxNLocator(width // 90, integer=True, steps=STEPS).tick_values(low, high)
        if low <= step <= high
    ]


def _mark(mark: Mark, at: float) -> str:
    title = f"<title>step {mark.step:,.0f}: {escape(mark.label)}</title>"
    wide = f'<line class="touch" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    thin = f'<line class="mark {mark.style}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return f"<g>{title}{wide}{thin}</g>"


def _drawn(line: Line, x, y) -> str:
    points = [(x(step), y(value)) for step, value in zip(line.steps, line.values, strict=True)]
    if line.style == "dots":
        dots = (
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5"><title>step {step:,.0f}: {value:.4g}</title></circle>'
            for (a, b), step, value in zip(points, line.steps, line.values, strict=True)
        )
        return f'<g class="dots">{"".join(dots)}</g>'
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline class="line {line.style}" points="{path}"/>'


def _legend(lines: Sequence[Line], marks: Sequence[Mark]) -> str:
    named = [(line.style, line.label) for line in lines if line.label]
    styles = dict.fromkeys(mark.style for mark in marks)
    kinds = {style: dict.fromkeys(mark.kind for mark in marks if mark.style == style) for style in styles}
    shown = [*(named if len(named) > 1 else []), *((f"line {style}", ", ".join(kinds[style])) for style in styles)]
    items = (f'<span><i class="key {style}"></i>{escape(label)}</span>' for style, label in shown)
    return f'<div class="legend">{"".join(items)}</div>' if shown else ""
