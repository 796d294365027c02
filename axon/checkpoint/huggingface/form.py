"""How an array of theirs lies in one of ours: their dimensions in the names of our axes, sliced and transposed."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from axon.axes.patterns import Names, PatternError

Range = tuple[int, int]
Fetch = Callable[[tuple[slice, ...]], np.ndarray]
"""A part of an array of theirs, by slices of its dimensions."""


class Dim(NamedTuple):
    """A dimension of theirs: axes of ours, outermost first; `group`, those in brackets, is None without brackets."""

    before: Names
    group: Names | None
    after: Names


class _Atom(NamedTuple):
    """A factor of a dimension: its size, and the range of it that is wanted."""

    size: int
    range: Range


def parse_form(text: str) -> tuple[Dim, ...]:
    """`embed ([heads head_dim] parts)` → its dimensions. Raises `PatternError` for what is none."""
    dims: list[Dim] = []
    for outer in re.findall(r"\([^)]*\)|\[[^\]]*\]|\w+|\S", text):
        parts = re.fullmatch(r"([\w ]*)(?:\[([\w ]*)\])?([\w ]*)", outer.removeprefix("(").removesuffix(")"))
        if parts is None:
            raise PatternError(f"{text!r}: {outer!r} is no dimension; expected axes, `(axes)` or `[axes]`")
        before, group, after = (None if part is None else _axes(part) for part in parts.groups())
        dims.append(Dim(before or (), group, after or ()))
    if sum(dim.group is not None for dim in dims) > 1:
        raise PatternError(f"{text!r} has brackets twice: arrays can follow each other along one dimension")
    return tuple(dims)


def _axes(text: str) -> Names:
    return tuple(name for name in text.split() if name != "1")


@dataclass(frozen=True)
class Form:
    """An array of theirs as axes of ours.

    Args:
        dims: its dimensions. ours: the axes in our order. sizes: of these axes, in their array.
    """

    dims: tuple[Dim, ...]
    ours: Names
    sizes: Mapping[str, int]

    @property
    def group_size(self) -> int:
        """How much of the dimension with brackets is ours; 0 without brackets."""
        groups = [dim.group for dim in self.dims if dim.group is not None]
        return self._product(groups[0]) if groups else 0

    def shape(self, total: int) -> tuple[int, ...]:
        """The shape of their array, `total` the size of what is in brackets in all rows."""
        return tuple(math.prod(sizes) for sizes in self._factors(total))

    @property
    def outermost(self) -> str | None:
        """The first axis of their first dimension: the ranges of it lie one after the other in a file."""
        if not self.dims:
            return None
        before, group, after = self.dims[0]
        return next(iter((*before, *(group or ()), *after)), None)

    def elements(self, wanted: Mapping[str, Range], start: int, total: int) -> int:
        """How many elements of their array `read` reads."""
        return math.prod(one.stop - one.start for one in self._enclosing(wanted, start, total))

    def read(self, fetch: Fetch, wanted: Mapping[str, Range], start: int, total: int) -> np.ndarray:
        """The part of ours in the ranges `wanted`, by axis: of their array it reads what encloses it, and no more.

        `start`: where ours begins in the brackets.
        """
        shape, cut = [], []
        for dim in self.dims:
            (_, (low, high)), *rest = self._atoms(dim, wanted, start, total)
            shape += [high - low, *(size for size, _ in rest)]
            cut += [slice(None), *(slice(*one) for _, one in rest)]
        found = fetch(self._enclosing(wanted, start, total)).reshape(shape)[tuple(cut)]
        return self._ours(found, wanted)

    def write(self, out: np.ndarray, value: np.ndarray, start: int, total: int) -> None:
        """Put ours, all of it, into their array `out`."""
        expanded = out.reshape([size for factors in self._factors(total) for size in factors])
        where = [
            slice(start, start + self.group_size) if is_group else slice(None)
            for dim in self.dims
            for is_group in [False] * len(dim.before) + [True] * (dim.group is not None) + [False] * len(dim.after)
        ]
        part = expanded[tuple(where)]
        part[...] = value.transpose([self.ours.index(name) for name in self.names]).reshape(part.shape)

    def _enclosing(self, wanted: Mapping[str, Range], start: int, total: int) -> tuple[slice, ...]:
        """What `read` reads: the ranges of outermost axes, with all that is within them."""
        read = []
        for dim in self.dims:
            (_, (low, high)), *rest = self._atoms(dim, wanted, start, total)
            inner = math.prod(size for size, _ in rest)
            read.append(slice(low * inner, high * inner))
        return tuple(read)

    def _ours(self, found: np.ndarray, wanted: Mapping[str, Range]) -> np.ndarray:
        """Atoms in their order, a group in one → our axes in our order."""
        shape, cut = [], []
        for dim in self.dims:
            for name in dim.before:
                shape.append(wanted[name][1] - wanted[name][0])
                cut.append(slice(None))
            for number, name in enumerate(dim.group or ()):
                low, high = wanted[name]
                shape.append(high - low if number == 0 else self.sizes[name])
                cut.append(slice(None) if number == 0 else slice(low, high))
            for name in dim.after:
                shape.append(wanted[name][1] - wanted[name][0])
                cut.append(slice(None))
        names = self.names
        return found.reshape(shape)[tuple(cut)].transpose([names.index(name) for name in self.ours])

    def _atoms(self, dim: Dim, wanted: Mapping[str, Range], start: int, total: int) -> list[_Atom]:
        group = []
        if dim.group is not None:
            low, high = wanted[dim.group[0]] if dim.group else (0, 1)
            inner = self._product(dim.group[1:])
            group = [_Atom(total, (start + low * inner, start + high * inner))]
        before, after = ([_Atom(self.sizes[name], wanted[name]) for name in names] for names in (dim.before, dim.after))
        return [*before, *group, *after] or [_Atom(1, (0, 1))]

    def _factors(self, total: int) -> list[list[int]]:
        return [
            [
                *(self.sizes[name] for name in dim.before),
                *([total] if dim.group is not None else []),
                *(self.sizes[name] for name in dim.after),
            ]
            for dim in self.dims
        ]

    @property
    def names(self) -> list[str]:
        """The axes in their order."""
        return [name for dim in self.dims for name in (*dim.before, *(dim.group or ()), *dim.after)]

    def _product(self, names: Names) -> int:
        return math.prod(self.sizes[name] for name in names)
