"""Which step of a kernel's grid works on which rows of which group: computed from the sizes, at run time.

Rows are cut into tiles at fixed places. A tile that several groups share is visited once for each of them, one after
the other, so there are at most `ceil(rows / tile) + groups - 1` visits, whatever the sizes are: a bound that is known
when the program is compiled, as in megablox (MegaBlocks, Gale et al., arXiv:2211.15841, section 5, has the idea).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


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
    starts, stops, first, spans = _spans(sizes, rows, tile)
    live, steps = _expanded(first, spans, rows, tile)
    step = jnp.arange(steps.group.shape[0], dtype=jnp.int32)
    covered = _tiles(stops[-1], tile)
    in_use = step < live
    visits = Visits(
        tile=jnp.where(in_use, steps.source, jnp.minimum(covered + step - live, _tiles(rows, tile) - 1)),
        source=steps.source,
        group=steps.group,
        start=jnp.where(in_use, starts[steps.group], 0),
        stop=jnp.where(in_use, stops[steps.group], 0),
    )
    return visits, live + _tiles(rows, tile) - covered


def group_visits(sizes: Array, rows: int, tile: int) -> tuple[Visits, Array]:
    """Visits that together read all rows of a group and reach every group, and how many: one for an empty group."""
    starts, stops, first, spans = _spans(sizes, rows, tile)
    live, steps = _expanded(first, jnp.maximum(spans, 1), rows, tile)
    return Visits(steps.source, steps.source, steps.group, starts[steps.group], stops[steps.group]), live


class _Steps(NamedTuple):
    group: Array
    source: Array


def _tiles(rows: Array | int, tile: int):
    return (rows + tile - 1) // tile


def _spans(sizes: Array, rows: int, tile: int) -> tuple[Array, Array, Array, Array]:
    """Of each group: its first row, the row after its last, its first tile and how many tiles it touches."""
    stops = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), stops[:-1]])
    first = starts // tile
    return starts, stops, first, jnp.where(stops > starts, _tiles(stops, tile) - first, 0)


def _expanded(first: Array, counts: Array, rows: int, tile: int) -> tuple[Array, _Steps]:
    """`counts` visits of each group at consecutive tiles from its `first` on; steps past the last one repeat it."""
    groups = counts.shape[0]
    most = most_visits(rows, groups, tile)
    ends = jnp.cumsum(counts)
    live = ends[-1]
    step = jnp.clip(jnp.arange(most, dtype=jnp.int32), 0, jnp.maximum(live - 1, 0))
    group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), counts, total_repeat_length=most)[step]
    source = first[group] + step - (ends - counts)[group]
    return live, _Steps(group, jnp.clip(source, 0, _tiles(rows, tile) - 1))
