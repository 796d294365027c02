"""Pages from HBM to VMEM: which ones a block of queries needs, and the copies that bring them while others are used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.ragged import AttentionConfig

TILE = 16
"""Rows of a tile of bfloat16; blocks of queries are whole tiles."""

NARROW = (64, 96)
"""Widths of a head with which XLA keeps a cache's tokens along lanes, where pages fill these: nothing is padded."""


def along_lanes(cache: Cache) -> bool:
    """Whether the kernels see a page's keys and values as `kv_heads head_dim page_size`, which is how they lie."""
    return cache.head_dim in NARROW


def tiled(rows: int) -> int:
    """So many rows, and what fills their last tile."""
    return -(-rows // TILE) * TILE


@dataclass(frozen=True)
class Shape:
    """Constants of the program.

    Args:
        page_size: positions a page. width: pages a step. columns: of the page table.
        queries: rows a block. group: heads that share one head of keys.
        shares: of the blocks, each for a core. splits: parts of each block's steps, likewise.
        lanes: whether a page's tokens lie along lanes. config: how scores are computed.
    """

    page_size: int
    width: int
    columns: int
    queries: int
    group: int
    shares: int
    splits: int
    lanes: bool
    config: AttentionConfig

    @property
    def keys(self) -> int:
        """Positions a step."""
        return self.page_size * self.width


@dataclass(frozen=True)
class Work:
    """What the scalar core knows of the blocks, in SMEM: `Blocks`, and each one's first page's column."""

    table: Any
    sequences: Any
    positions: Any
    ends: Any
    columns: Any

    def steps(self, block: Any, part: Any, shape: Shape) -> tuple[Any, Any]:
        """The steps `[first, last)` of one part of a block's pages."""
        live = self.ends[block] - self.columns[block] * shape.page_size
        total = lax.div(jnp.maximum(live, 0) + shape.keys - 1, shape.keys)
        if shape.splits == 1:
            return jnp.int32(0), total
        size = lax.div(total + shape.splits - 1, shape.splits)
        return jnp.minimum(part * size, total), jnp.minimum((part + 1) * size, total)


@dataclass(frozen=True)
class PageStream:
    """The copies of pages from HBM to the buffers `2 width kv_heads page_size …`."""

    work: Work
    shape: Shape
    pages: Sequence[Any]
    buffers: Sequence[Any]
    arrived: Any

    def clear_values(self) -> None:
        """Before any copy: what fills a step past its last page has a weight of 0, which does not hide NaN."""
        for values in self.buffers[1::2]:
            values[...] = jnp.zeros(values.shape, values.dtype)

    def start(self, block: Any, step: Any, slot: Any) -> None:
        self._each(block, step, slot, lambda copy: copy.start())

    def wait(self, block: Any, step: Any, slot: Any) -> None:
        """For a step's copies: at once for those that fill the buffers, as a semaphore counts bytes, not copies."""
        live = self._live(block, step)

        @pl.when(live == self.shape.width)
        def _():
            for index, buffer in enumerate(self.buffers):
                whole = buffer.at[slot]
                pltpu.make_async_copy(whole, whole, self.arrived.at[slot, index]).wait()

        @pl.when(live < self.shape.width)
        def _():
            self._each(block, step, slot, lambda copy: copy.wait())

    def start_first(self, block: Any, part: Any, slot: Any) -> None:
        """What a part's first step of a block needs, if there is such a block, and it has steps."""
        count = pl.num_programs(1) * self.shape.shares
        first, last = self.work.steps(jnp.minimum(block, count - 1), part, self.shape)

        @pl.when((block < count) & (first < last))
        def _():
            self.start(block, first, slot)

    def _live(self, block: Any, step: Any) -> Any:
        """How many of a step's pages there are; those past the block's end are left out."""
        left = self.work.ends[block] - self._column(block, step) * self.shape.page_size
        return jnp.clip(lax.div(left + self.shape.page_size - 1, self.shape.page_size), 0, self.shape.width)

    def _column(self, block: Any, step: Any) -> Any:
        return self.work.columns[block] + step * self.shape.width

    def _each(self, block: Any, step: Any, slot: Any, act: Callable[[Any], None]) -> None:
        """One copy a page and array."""
        column, live = self._column(block, step), self._live(block, step)
        row = self.work.sequences[block] * self.shape.columns

        def page(place, _):
            number = self.work.table[row + column + place]
            for index, (source, buffer) in enumerate(zip(self.pages, self.buffers, strict=True)):
                target = buffer.at[slot, place]
                act(pltpu.make_async_copy(source.at[number], target, self.arrived.at[slot, index]))

        lax.fori_loop(0, live, page, None)
