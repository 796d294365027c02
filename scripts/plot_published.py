"""Draw docs/planner/published.png: errors of published runs in docs/planner.md that the planner was not fitted on."""

import re
from collections.abc import Iterator
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
INK, WITHIN, BEYOND, BAND = "#202124", "#4f97dd", "#da6832", "#eef3f8"


def rows(page: str) -> Iterator[tuple[str, str]]:
    """(run, error in %) of each row that is not marked as fitted."""
    section = page.split("## Seconds, beside published runs")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        error = re.fullmatch(r"\**([+−]?\d+) %\**", cells[-1])
        if len(cells) == 6 and error and "fitted" not in cells[0]:
            yield re.sub(r" \(.*?\)", "", cells[0].partition(";")[0]), error[1]


def draw(path: Path) -> None:
    """A bar for each of them; within 10 % is blue."""
    found = list(rows((DOCS / "planner.md").read_text()))
    figure = Figure(figsize=(9.0, 0.8 + 0.34 * len(found)), dpi=140, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axvspan(-10, 10, color=BAND)
    names, told = zip(*found, strict=True)
    errors = [int(one.replace("−", "-")) for one in told]
    axes.barh(names, errors, color=[WITHIN if abs(one) <= 10 else BEYOND for one in errors], height=0.6)
    for place, (error, text) in enumerate(zip(errors, told, strict=True)):
        side, gap = ("left", 0.8) if error >= 0 else ("right", -0.8)
        axes.text(error + gap, place, f"{text} %", va="center", ha=side, fontsize=8)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlim(min(errors) - 9, max(errors) + 9)
    axes.set_xlabel("predicted tokens a second ÷ published − 1, %; shaded: within 10 %", color=INK, fontsize=9)
    axes.invert_yaxis()
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    draw(DOCS / "planner" / "published.png")
