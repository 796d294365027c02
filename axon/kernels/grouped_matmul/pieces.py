"""What a visit multiplies of a tile: its own rows, in pieces of a few static sizes, each compiled once.

The rows of a group begin and end anywhere. From the registers' 8 rows in which they begin on they are cut into whole
pieces and one of a smaller size, so that what is multiplied in vain is a fraction of a piece at each end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

SUBLANES = 8
"""Rows of a tile of HBM and of a register: a piece begins at a multiple of it."""


class Pieces(NamedTuple):
    """Sizes: of a whole piece, and in order those below it that the last may have."""

    whole: int
    rest: tuple[int, ...]


class Cover(NamedTuple):
    """Pieces of a tile: from row `first` on `wholes` whole ones, then one of `rest` rows if that is not 0."""

    first: Any
    wholes: Any
    rest: Any


def cover(low: Any, high: Any, rows: int, pieces: Pieces) -> Cover:
    """The pieces over rows `[low, high)` of a tile of `rows`, a multiple of all sizes; none if `low >= high`."""
    first = low // SUBLANES * SUBLANES
    needed = jnp.where(low < high, high - first, 0)
    wholes, left = needed // pieces.whole, needed % pieces.whole
    rest = 0 * left
    for size, smaller in zip((*pieces.rest, pieces.whole), (0, *pieces.rest), strict=True):
        rest = jnp.where(left > smaller, size, rest)
    first = jnp.minimum(first, rows - wholes * pieces.whole - rest)
    return Cover(first, wholes + rest // pieces.whole, rest % pieces.whole)


def for_each_piece(found: Cover, rows: int, pieces: Pieces, body: Callable[[Any, int], None]) -> None:
    """In a kernel: `body(first row, size)` for each piece; its code is compiled once for each size."""
    if rows == pieces.whole:
        pl.when(found.wholes > 0)(lambda: body(0, rows))
    else:

        def whole(i, _):
            body(pl.multiple_of(found.first + i * pieces.whole, SUBLANES), pieces.whole)

        lax.fori_loop(0, found.wholes, whole, None)
    last = pl.multiple_of(found.first + found.wholes * pieces.whole, SUBLANES)
    for size in pieces.rest:
        pl.when(found.rest == size)(partial(body, last, size))


def for_each_chunk(columns: int, width: int, body: Callable[[Any], None]) -> None:
    """In a kernel: `body(slice)` for `width` columns at a time, which is compiled once, and for those that are left."""
    width = min(width, columns)

    def chunk(i, _):
        body(pl.ds(pl.multiple_of(i * width, width), width))

    if width == columns:
        body(pl.ds(0, columns))
    else:
        lax.fori_loop(0, columns // width, chunk, None)
        if columns % width:
            body(pl.ds(columns - columns % width, columns % width))
