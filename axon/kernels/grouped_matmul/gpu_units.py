"""The work of the Hopper kernels' blocks, one unit of work after the other: computed from the sizes, at run time.

A group's tiles of rows begin with the 8 rows in which the group does, so that only its first and its last have rows of
others. (Shared memory is in tiles of 8 rows. TMA that begins between two fills the rest with zeros; the interpreter
copies from anywhere.)
"""

import jax.numpy as jnp
from jax import Array

from axon.kernels.grouped_matmul.visits import edges, enumerated_visits

GROUP, ROW, START, STOP, COLUMN = range(5)
"""Columns of the table of units: the group, the first row of the tile, the group's rows, and the tile of columns."""

ALIGNED = 8
"""What a tile's first row is a multiple of."""


def most_tiles(rows: int, groups: int, tile: int) -> int:
    """How many tiles of rows there can be, with those of the rows that are in no group."""
    return (rows + (groups + 1) * (tile - 1 + ALIGNED - 1)) // tile


def product_units(sizes: Array, rows: int, tile: int, columns: int) -> tuple[Array, Array]:
    """The units of a product, `units 5`, and how many there are, `1`; those from the count on are skipped.

    Of a group: for each of the `columns` tiles of columns the group's tiles of rows, so that blocks that run together
    read the same weight. After the last group come the rows of no group, as group number `groups`.
    """
    start, stop = edges(sizes, rows)
    start, stop = jnp.append(start, stop[-1]), jnp.append(stop, rows)
    first = start // ALIGNED * ALIGNED
    tiles = jnp.where(stop > start, -(-(stop - first) // tile), 0)
    live, group, number = enumerated_visits(tiles * columns, most_tiles(rows, sizes.shape[0], tile) * columns)
    down = jnp.maximum(tiles[group], 1)
    row = first[group] + number % down * tile
    return jnp.stack([group, row, start[group], stop[group], number // down], axis=1), live[None]


def padded(operand: Array) -> Array:
    """With rows to a multiple of 8, of which the tiles of shared memory are."""
    return jnp.pad(operand, ((0, -operand.shape[0] % ALIGNED), (0, 0)))
