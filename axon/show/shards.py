"""One weight's shards on a mesh, as a picture shows them: a rectangle, and which devices hold which part of it."""

import colorsys
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from axon.axes.patterns import Names
from axon.layout import ArraySpec, Placement

MOST = 8
"""Places along an axis that are drawn; of more, the first few and the last."""

GOLDEN = 0.618
"""Of a turn of the colour wheel, after which each colour falls far from those before it."""

Index = int | None
"""A place along an axis, or None for those left out."""


def shown(count: int, most: int = MOST) -> list[Index]:
    """Which of `count` places are drawn, `most` at the most; None stands for those between."""
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]


@dataclass(frozen=True)
class Side:
    """One axis of a weight: its name, its size and the mesh axes that cut it, each with its size."""

    name: str
    size: int
    cuts: Mapping[str, int]

    @property
    def num_shards(self) -> int:
        return math.prod(self.cuts.values())

    def part(self, device: Mapping[str, int]) -> int:
        """Which part a device holds, by its place along each mesh axis."""
        number = 0
        for axis, size in self.cuts.items():
            number = number * size + device[axis]
        return number

    def places(self, part: int) -> dict[str, int]:
        """Mesh axis → the place of those that hold a part."""
        found = {}
        for axis in reversed(list(self.cuts)):
            part, found[axis] = divmod(part, self.cuts[axis])
        return {axis: found[axis] for axis in self.cuts}


@dataclass(frozen=True)
class Shards:
    """A weight as a rectangle: the two axes that are cut most are its sides, `others` are named below."""

    mesh: Mapping[str, int]
    rows: Side
    columns: Side
    others: tuple[Side, ...]

    @classmethod
    def of(cls, placement: Placement, spec: ArraySpec) -> "Shards":
        """A stored parameter's."""
        mesh = placement.mesh.shape
        sides = [
            Side(name, size, {axis: mesh[axis] for axis in placement.mesh_axes(name, "params")})
            for name, size in zip(spec.axes, spec.shape, strict=True)
        ]
        sides = [Side("", 1, {}), *sides] if len(sides) == 1 else sides
        rank = sorted(sides, key=lambda side: (side.num_shards, side.name != "layers", side.size), reverse=True)
        rows, columns = (side for side in sides if side in rank[:2])
        return cls(dict(mesh), rows, columns, tuple(side for side in sides if side not in rank[:2]))

    @property
    def copied(self) -> Names:
        """The mesh axes along which every device holds the same."""
        cut = {axis for side in (self.rows, self.columns, *self.others) for axis in side.cuts}
        return tuple(axis for axis, size in self.mesh.items() if size > 1 and axis not in cut)

    def holders(self, row: int, column: int) -> list[int]:
        """The numbers, in the mesh's order, of the devices that hold a part of the rectangle."""
        fixed = self.rows.places(row) | self.columns.places(column)
        free = [range(size) if axis not in fixed else (fixed[axis],) for axis, size in self.mesh.items()]
        return [self.number(dict(zip(self.mesh, places, strict=True))) for places in itertools.product(*free)]

    def number(self, device: Mapping[str, int]) -> int:
        """A device's number in the mesh's order."""
        return Side("", 1, self.mesh).part(device)

    def colour(self, row: int, column: int) -> tuple[float, float, float]:
        """Hue along the side that is cut more, lightness along the other; neighbours differ, however many there are."""
        longer, shorter = self.rows.num_shards, self.columns.num_shards
        hue, shade = row, column
        if shorter > longer:
            longer, shorter, hue, shade = shorter, longer, column, row
        turn = GOLDEN * hue if longer > MOST else 0.85 * hue / longer
        lightness = 0.70 + 0.16 * shade / max(1, shorter - 1)
        return colorsys.hls_to_rgb((0.58 + turn) % 1, lightness, 0.62)
