"""Which step of a kernel's grid works on which rows of which group: computed from the sizes, at run time.

For a product rows are cut into tiles at fixed places. A tile that several groups share is visited once for each of
them, one after the other, so there are at most `ceil(rows / tile) + groups - 1` visits, whatever the sizes are: a bound
that is known when the program is compiled, as in megablox (MegaBlocks, Gale et al., arXiv:2211.15841, section 5, has
the idea). For the weights' gradient, whose result is not of rows, tiles begin where a group begins.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.kernels.grouped_matmul.pieces import SUBLANES


class Visits(NamedTuple):
    """For each visit, all `visits` and int32; those from the count on are skipped."""

    tile: Array  # the tile of rows that is written
    source: Array  # the tile that is read: where there is nothing to read, the previous one, which needs no copy
    group: Array  # whose weight is read
    start: Array  # the first row of the group, in the whole array
    stop: Array  # the row after its last; `start` where the visit has no rows


def most_visits(rows: int, groups: int, tile: int) -> int:
    """How many visits there can be."""
    return -(-rows // tile) + groups - 1


def row_visits(sizes: Array, rows: int, tile: int) -> tuple[Visits, Array]:
    """Visits that together write all rows, and how many: a group's in turn, then the tiles that no group reaches."""
    starts, stops = edges(sizes, rows)
    first, tiles = starts // tile, _tiles(rows, tile)
    spans = jnp.where(stops > starts, _tiles(stops, tile) - first, 0)
    live, group, number = enumerated_visits(spans, most_visits(rows, sizes.shape[0], tile))
    source = jnp.clip(first[group] + number, 0, tiles - 1)
    step = jnp.arange(group.shape[0], dtype=jnp.int32)
    covered = _tiles(stops[-1], tile)
    in_use = step < live
    visits = Visits(
        tile=jnp.where(in_use, source, jnp.minimum(covered + step - live, tiles - 1)),
        source=source,
        group=group,
        start=jnp.where(in_use, starts[group], 0),
        stop=jnp.where(in_use, stops[group], 0),
    )
    return visits, live + tiles - covered


class GroupVisits(NamedTuple):
    """For each visit of the weights' gradient, all `visits` and int32; those from the count on are skipped."""

    eighth: Array  # where the tile that is read begins, in registers of 8 rows
    group: Array  # whose sum it adds to
    start: Array  # the first row that is added, in the whole array
    stop: Array  # the row after the last; `start` where the group is empty


def most_group_visits(rows: int, groups: int, tile: int) -> int:
    """How many visits there can be where a group's begin with the group."""
    return groups + (rows + groups * (SUBLANES - 1)) // tile


def group_visits(sizes: Array, rows: int, tile: int) -> tuple[GroupVisits, Array]:
    """Visits that together read all rows of a group and reach every group, and how many: one for an empty group.

    A group's tiles begin with its own first register of rows, but for those that would end beyond the array: `rows`,
    to a whole register and to a tile at least.
    """
    starts, stops = edges(sizes, rows)
    first = starts // SUBLANES * SUBLANES
    counts = jnp.maximum(_tiles(stops - first, tile), 1)
    live, group, number = enumerated_visits(counts, most_group_visits(rows, sizes.shape[0], tile))
    begin = first[group] + number * tile
    last = max(_tiles(rows, SUBLANES) * SUBLANES - tile, 0)
    start = jnp.maximum(begin, starts[group])
    stop = jnp.minimum(begin + tile, stops[group])
    return GroupVisits(jnp.minimum(begin, last) // SUBLANES, group, start, stop), live


def edges(sizes: Array, rows: int) -> tuple[Array, Array]:
    """Of each group: its first row, and the row after its last."""
    stops = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), stops[:-1]]), stops


def _tiles(rows: Array | int, tile: int):
    return (rows + tile - 1) // tile


def enumerated_visits(counts: Array, most: int) -> tuple[Array, Array, Array]:
    """How many visits there are, and of each its group and its number there; steps past the last one repeat it."""
    ends = jnp.cumsum(counts)
    live = ends[-1]
    step = jnp.clip(jnp.arange(most, dtype=jnp.int32), 0, jnp.maximum(live - 1, 0))
    group = jnp.repeat(jnp.arange(counts.shape[0], dtype=jnp.int32), counts, total_repeat_length=most)[step]
    return live, group, step - (ends - counts)[group]
