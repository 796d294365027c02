"""The work of the Hopper kernel: blocks of rows, the tiles of keys that each meets, and in how many parts."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.hopper import multiprocessors
from axon.kernels.paged_attention.blocks import Blocks
from axon.kernels.paged_attention.cache import Cache, quantised
from axon.kernels.paged_attention.gpu_support import SIZES
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.kernels.warpgroups import CONSUMERS, ROWS

WAVES = 2
"""Blocks of threads for each multiprocessor, at least, for which the pages of sequences are split."""

PART = 8
"""Tiles of a part of a sequence, at least, where its page table is full."""

TMA_ROWS = 8
"""Rows of shared memory that a copy writes, as a multiple."""


@dataclass(frozen=True)
class Shape:
    """Constants of the program.

    Args:
        page_size: positions a page. columns: of the page table. tile, stages: see `gpu_support.Sizes`.
        rows: of a block: 64 that both consumers have, each for every other tile of keys, or 128, 64 for each.
        group: heads that share a head of keys, whose rows are contiguous.
        splits: parts of each block's tiles. config: how scores are computed.
    """

    page_size: int
    columns: int
    tile: int
    stages: int
    rows: int
    group: int
    splits: int
    config: AttentionConfig

    @property
    def alternating(self) -> bool:
        """Whether the consumers have the same rows."""
        return self.rows == ROWS

    @property
    def chunk(self) -> int:
        """Positions that one copy brings."""
        return min(self.tile, self.page_size)

    @property
    def chunks(self) -> int:
        """Copies for a tile of keys."""
        return self.tile // self.chunk


def queries_of_block(q: Any, cache: Cache, inputs: AttentionInputs) -> int:
    """1 for a decode step; else as many as fill 64 rows, where a sequence has no more on average, or 128."""
    tokens, group = q.shape[0], q.shape[1] // cache.kv_heads
    if tokens <= inputs.sequences:
        return 1
    few = tokens * group <= ROWS * inputs.sequences
    return (ROWS if few else CONSUMERS * ROWS) // group


def shape_of(q: Array, cache: Cache, inputs: AttentionInputs, plan: Blocks, config: AttentionConfig) -> Shape:
    """For the blocks of a plan."""
    group, columns = q.shape[1] // cache.kv_heads, inputs.page_table.shape[1]
    alternating = plan.queries * group <= ROWS
    sizes = SIZES[cache.head_dim, quantised(cache.keys.dtype)]
    tile, stages = sizes.alternating if alternating else sizes.apart
    return Shape(
        page_size=cache.page_size,
        columns=columns,
        tile=tile,
        stages=stages,
        rows=ROWS if alternating else CONSUMERS * ROWS,
        group=group,
        splits=_splits(len(plan.sizes) * cache.kv_heads, columns * cache.page_size, tile),
        config=config,
    )


def _splits(blocks: int, capacity: int, tile: int) -> int:
    """As many parts as all multiprocessors need, but none of a few tiles."""
    return max(1, min(-(-WAVES * multiprocessors() // blocks), capacity // (PART * tile)))


class Place(NamedTuple):
    """Where a block of threads works: block of rows, head of keys, and part of the tiles.

    Attributes:
        sequence: row of the page table. first, stop: the tiles that it meets.
        whole, whole_stop: those that need no mask. end: one past the last position that a row sees.
    """

    block: Array
    head: Array
    split: Array
    sequence: Array
    first: Array
    stop: Array
    whole: Array
    whole_stop: Array
    end: Array

    def partly(self, at: Array) -> Array:
        """Whether the pairs with tile `at` may have to be masked."""
        return (at < self.whole) | (at >= self.whole_stop)


def place(table: Any, shape: Shape) -> Place:
    """The place of this block of threads. A prefill's last blocks, which take longest, begin first."""
    block, split = lax.axis_index("block"), lax.axis_index("split")
    block = block if shape.alternating else table.shape[0] - 1 - block
    sequence, first, stop, *rest = (table[block, column] for column in range(len(_TABLE)))
    if shape.splits > 1:
        size = lax.div(stop - first + shape.splits - 1, jnp.int32(shape.splits))
        first = jnp.minimum(first + split * size, stop)
        stop = jnp.minimum(first + size, stop)
    return Place(block, lax.axis_index("head"), split, sequence, first, stop, *rest)


_TABLE = ("sequence", "first", "stop", "whole", "whole_stop", "end")


def table(plan: Blocks, shape: Shape) -> Array:
    """What a block of threads reads of its rows, `blocks 6`, in global memory: `Place` from `sequence` on."""
    window, last = shape.config.window, plan.positions + plan.sizes - 1
    low = jnp.zeros_like(last) if window is None else jnp.maximum(last - window + 1, 0)
    first = plan.first_keys(window) // shape.tile
    stop = -(-plan.ends // shape.tile)
    whole, whole_stop = -(-low // shape.tile), (plan.positions + 1) // shape.tile
    columns = (plan.sequences, jnp.minimum(first, stop), stop, whole, whole_stop, plan.ends)
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def row_positions(plan: Blocks, shape: Shape) -> Array:
    """`blocks rows`: the position of each row's query; −1 for a row without one, which so sees nothing."""
    queries = jnp.repeat(jnp.arange(plan.queries, dtype=jnp.int32), shape.group)
    positions = jnp.where(queries < plan.sizes[:, None], plan.positions[:, None] + queries, -1)
    return jnp.pad(positions, ((0, 0), (0, shape.rows - len(queries))), constant_values=-1)
