"""Pages from global to shared memory, by TMA, as the page table says: the producer of the Hopper kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.paged_attention.gpu_work import Place, Shape


class Feed(NamedTuple):
    """What is copied together: keys or values, and their scales.

    Attributes:
        pages: arrays of pages in global memory, `pages kv_heads page_size …`. rings: of each, `stages` tiles in shared
            memory. full, free: for each stage, the barrier on which consumers wait for the copies, and this for them.
    """

    pages: Sequence[Any]
    rings: Sequence[Any]
    full: Any
    free: Any


def produce(shape: Shape, here: Place, page_table: Any, feeds: Sequence[Feed]) -> None:
    """Copy the tiles of a place, as shared memory becomes free, in the order in which they are met."""

    @pl.loop(here.first, here.stop)
    def _(at):
        slot, reused = lax.rem(at - here.first, jnp.int32(shape.stages)), at >= here.first + shape.stages
        chunks = [_chunk(shape, here, page_table, at, index) for index in range(shape.chunks)]
        for feed in feeds:
            pl.when(reused)(lambda feed=feed: plgpu.barrier_wait(feed.free.at[slot]))
            for pages, ring in zip(feed.pages, feed.rings, strict=True):
                for index, (page, offset) in enumerate(chunks):
                    source = pages.at[page, here.head, pl.ds(offset, shape.chunk)]
                    to = ring.at[slot, pl.ds(index * shape.chunk, shape.chunk)]
                    plgpu.copy_gmem_to_smem(source, to, feed.full.at[slot])


def _chunk(shape: Shape, here: Place, page_table: Any, at: Array, index: int) -> tuple[Array, Array]:
    """The page of a chunk of tile `at`, and where in it the chunk begins; page 0, which is finite, past the end."""
    position = at * shape.tile + index * shape.chunk
    column = jnp.minimum(lax.div(position, jnp.int32(shape.page_size)), shape.columns - 1)
    page = jnp.where(position < here.end, page_table[here.sequence, column], 0)
    return page, lax.rem(position, jnp.int32(shape.page_size))
