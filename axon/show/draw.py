"""`axon show --draw`: a picture of the mesh, and of one weight's shards on it."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from axon.disk import writing
from axon.errors import UserError, suggest
from axon.layout import ArraySpec, Placement
from axon.show.shards import Index, Shards, Side, shown

INK, FAINT = "#3c4043", "#80868b"

GAP = 0.5
"""Between blocks of devices, in widths of a device."""


def draw(placement: Placement, parameters: Mapping[str, ArraySpec], path: Path, weight: str | None = None) -> None:
    """Draw the mesh, and next to it `weight` cut into shards, in the colours of the devices that hold them.

    Args:
        weight: a parameter's path; the largest by default. path: of the file; its suffix says the format.

    Raises `UserError` for a weight or a format that does not exist.
    """
    if weight is None:
        weight = max(parameters, key=lambda name: math.prod(parameters[name].shape))
    if weight not in parameters:
        raise UserError(f"--weight: no parameter is called {weight!r}.{suggest(weight, parameters)}")
    shards = Shards.of(placement, parameters[weight])
    figure = Figure(figsize=(11, 5), dpi=100, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    if path.suffix.removeprefix(".").lower() not in canvas.get_supported_filetypes():
        raise UserError(
            f"--draw: unsupported image format {path.suffix!r} of {str(path)!r}; write FILE.png, .svg or .pdf"
        )
    _draw_mesh(figure.add_axes((0.02, 0.10, 0.42, 0.74)), shards)
    _draw_weight(figure.add_axes((0.57, 0.13, 0.41, 0.60)), shards)
    _titles(figure, weight, shards)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _titles(figure: Figure, weight: str, shards: Shards) -> None:
    devices = math.prod(shards.mesh.values())
    shape = " × ".join(side.name for side in (shards.rows, shards.columns) if side.name)
    figure.text(0.03, 0.94, f"mesh of {devices:,} devices", color=INK, fontsize=12)
    figure.text(0.48, 0.94, weight, color=INK, fontsize=12)
    figure.text(0.48, 0.895, "; ".join([shape, *map(_other, shards.others)]), color=FAINT, fontsize=9)
    names = [axis for axis, size in shards.mesh.items() if size > 1]
    if len(names) > 1:
        figure.text(0.03, 0.03, f"links, slowest to fastest: {' → '.join(names)}", color=FAINT, fontsize=9)
    figure.text(0.48, 0.03, _copies(shards), color=FAINT, fontsize=9)


def _other(side: Side) -> str:
    if side.cuts:
        return f"{side.name} {side.size:,} cut over {' × '.join(side.cuts)}"
    return f"one of {side.size} layers" if side.name == "layers" else f"{side.name} {side.size:,} whole"


def _copies(shards: Shards) -> str:
    num_shards = math.prod(shards.mesh[axis] for axis in shards.copied)
    if num_shards == 1:
        return "numbers are devices: each holds a shard of its own"
    return f"numbers are devices: each shard is on {num_shards} of them, copies along {', '.join(shards.copied)}"


# ---- the mesh ---------------------------------------------------------------------------------------------------


def _draw_mesh(axes: Axes, shards: Shards) -> None:
    """Every device a square; the last mesh axis runs right, the one before down, the others are blocks of those."""
    mesh = {axis: size for axis, size in shards.mesh.items() if size > 1} or shards.mesh
    slots = _slots(mesh)
    width, height = _extent(slots, across=True), _extent(slots, across=False)
    line = max(1.0, width / 9, height / 7)  # of text, in widths of a device
    for places in itertools.product(*(range(len(one)) for one in slots.values())):
        at = {True: 0.0, False: 0.0}
        for axis, place in zip(slots, places, strict=True):
            at[_across(slots, axis)] += place * _step(slots, axis)
        found = {axis: slots[axis][place] for axis, place in zip(slots, places, strict=True)}
        _draw_device(axes, at[True], -at[False], found, shards, 8.5 / line**0.8)
    out = {True: 0.25 * line, False: 0.25 * line}
    for axis in reversed(slots):
        across = _across(slots, axis)
        label = f"{axis}  {mesh[axis]:,}"
        _label_mesh_axis(axes, label, slots[axis], _step(slots, axis), across, out[across], line)
        out[across] += 0.95 * line
    axes.set_xlim(-out[False], width + 0.1)
    axes.set_ylim(-height - 0.1, out[True])
    axes.set_aspect("equal", anchor="NW")
    axes.set_axis_off()


def _slots(mesh: Mapping[str, int]) -> dict[str, list[Index]]:
    """The places of each mesh axis that are drawn: as many as the page has room for."""
    for most in (8, 6, 5, 4):
        slots = {axis: shown(size, most) for axis, size in mesh.items()}
        if _extent(slots, across=True) <= 14 and _extent(slots, across=False) <= 12:
            return slots
    return {axis: shown(size, 3) for axis, size in mesh.items()}


def _across(slots: Mapping[str, Sequence[Index]], axis: str) -> bool:
    """Whether a mesh axis runs right, counted from the last; else down."""
    names = list(slots)
    return (len(names) - names.index(axis)) % 2 == 1


def _step(slots: Mapping[str, Sequence[Index]], axis: str) -> float:
    """How far a step along a mesh axis is: past all that lies inside."""
    names = list(slots)
    inner = {a: slots[a] for a in names[names.index(axis) + 2 :: 2]}
    extent = _span(list(inner.values()))
    return extent + (GAP if inner else 0)


def _extent(slots: Mapping[str, Sequence[Index]], across: bool) -> float:
    """The width, or the height, of a drawn mesh, in widths of a device."""
    return _span([places for axis, places in slots.items() if _across(slots, axis) == across])


def _span(axes: Sequence[Sequence[Index]]) -> float:
    span = 1.0
    for depth, places in enumerate(reversed(axes)):
        span = len(places) * span + (len(places) - 1) * (GAP if depth else 0)
    return span


def _draw_device(axes: Axes, x: float, y: float, places: Mapping[str, Index], shards: Shards, font: float) -> None:
    device = dict.fromkeys(shards.mesh, 0) | {axis: place for axis, place in places.items() if place is not None}
    if None in places.values():
        _write(axes, x + 0.5, y - 0.5, "···", FAINT, font)
        return
    colour = shards.colour(shards.rows.part(device), shards.columns.part(device))
    corner, shape = (x + 0.06, y - 0.94), "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch(corner, 0.88, 0.88, boxstyle=shape, facecolor=colour, edgecolor="none"))
    _write(axes, x + 0.5, y - 0.5, str(shards.number(device)), INK, font)


def _label_mesh_axis(
    axes: Axes, label: str, places: Sequence[Index], step: float, across: bool, out: float, line: float
) -> None:
    """A mesh axis by name and size along its direction, and its places; an outer mesh axis stands further out."""
    length = step - (GAP if step > 1 else 0)
    _write_along(axes, ((len(places) - 1) * step + length) / 2, out + 0.42 * line, across, label, INK, 10, rotated=True)
    for i, place in enumerate(places):
        if place is not None:
            _write_along(axes, i * step + length / 2, out, across, str(place), FAINT, 8)


def _write_along(
    axes: Axes, along: float, out: float, across: bool, text: str, colour: str, size: float, rotated: bool = False
) -> None:
    """Text outside of the mesh, at its top or its left edge."""
    x, y = (along, out) if across else (-out, -along)
    _write(axes, x, y, text, colour, size, rotated=rotated and not across)


def _write(axes: Axes, x: float, y: float, text: str, colour: str, size: float, rotated: bool = False) -> None:
    axes.text(x, y, text, color=colour, fontsize=size, ha="center", va="center", rotation=90 if rotated else 0)


# ---- the weight -------------------------------------------------------------------------------------------------


def _draw_weight(axes: Axes, shards: Shards) -> None:
    """A rectangle cut into shards, its sides labelled with the axis and the mesh axes that cut it."""
    rows, columns = shown(shards.rows.num_shards), shown(shards.columns.num_shards)
    width, height = 1 / len(columns), 1 / len(rows)
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        middle = ((j + 0.5) * width, -(i + 0.5) * height)
        if row is None or column is None:
            _write(axes, *middle, "···", FAINT, 8)
            continue
        corner, colour = (j * width + 0.004, -(i + 1) * height + 0.006), shards.colour(row, column)
        axes.add_patch(Rectangle(corner, width - 0.008, height - 0.012, facecolor=colour, edgecolor="none"))
        _write(axes, *middle, _numbers(shards.holders(row, column), room=round(62 * width)), INK, 8)
    _label_sides(axes, shards, rows, columns)
    axes.set_xlim(0, 1)
    axes.set_ylim(-1, 0)
    axes.set_axis_off()


def _label_sides(axes: Axes, shards: Shards, rows: Sequence[Index], columns: Sequence[Index]) -> None:
    for i, row in enumerate(rows):
        at = -(i + 0.5) / len(rows)
        axes.text(-0.015, at, _places(shards.rows, row), color=FAINT, fontsize=8, ha="right", va="center")
    for j, column in enumerate(columns):
        at = (j + 0.5) / len(columns)
        axes.text(at, 0.02, _places(shards.columns, column), color=FAINT, fontsize=8, ha="center", va="bottom")
    _write(axes, 0.5, 0.1 + 0.05 * max(1, len(shards.columns.cuts)), _side(shards.columns), INK, 10)
    _write(axes, -0.175, -0.5, _side(shards.rows), INK, 10, rotated=True)


def _side(side: Side) -> str:
    """`mlp 14,336 ÷ tensor 2 = 7,168`."""
    if not side.cuts:
        return f"{side.name} {side.size:,}, whole" if side.name else ""
    cuts = " ÷ ".join(f"{axis} {size}" for axis, size in side.cuts.items())
    return f"{side.name} {side.size:,} ÷ {cuts} = {side.size // side.num_shards:,}"


def _places(side: Side, part: Index) -> str:
    if part is None or not side.cuts:
        return ""
    return "\n".join(f"{axis} {place}" for axis, place in side.places(part).items())


def _numbers(devices: Sequence[int], room: int) -> str:
    """All devices, or the first and the last, or the first: what has room, in letters."""
    whole = ", ".join(map(str, devices))
    ends = f"{devices[0]} … {devices[-1]}"
    return next((text for text in (whole, ends) if len(text) <= room), f"{devices[0]} …")
