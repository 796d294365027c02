"""The Hopper kernel of paged attention: FlashAttention-3's block of threads (Shah et al., arXiv:2407.08608) over pages.

A block of threads has the queries of one block of rows and one head of keys, the group's heads as rows of one tile, and
meets the tiles of keys that they see, or a part of them. A producer warpgroup copies pages to shared memory; of two
consumer warpgroups each has 64 of 128 rows and meets every tile, taking turns on the tensor cores; or, where there are
64 rows or fewer, as in a decode step, each has all of them and meets every other tile, and both results are merged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.cost import Cost
from axon.kernels.paged_attention.gpu_memory import Buffers, Operands, buffers, feeds
from axon.kernels.paged_attention.gpu_output import Output
from axon.kernels.paged_attention.gpu_stream import produce
from axon.kernels.paged_attention.gpu_work import Place, Shape, place
from axon.kernels.warpgroups import CONSUMERS, ROWS, launch, meet, release, specialise
from axon.kernels.wgmma import COLUMN, ROW, TILE, along_columns, along_rows, filled, multiply, multiply_into, zeros
from axon.kernels.wgmma_softmax import LEAST, LOG2E, Running

NARROW = plgpu.Layout.WGMMA_UPCAST_2X
"""Of numbers of 8 bits, four of which lie together in a register."""


def widen(tile: Any, wide: Any) -> Any:
    """`wide`, bfloat16, with the numbers of a quantised cache's `tile[keys head_dim]`, both in shared memory."""
    for row in range(0, tile.shape[0], ROWS):
        rows = pl.ds(row, ROWS)
        wide[rows, ...] = _widened(plgpu.load(tile.at[rows], layout=NARROW))
    plgpu.commit_smem()
    return wide


def _widened(x: Array) -> Array:
    """Exactly; of float8_e4m3fn by way of float16, the conversion that Hopper has."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float16).astype(jnp.float32)
    return x.astype(jnp.bfloat16)


KEYS, VALUES = range(2)


class _Own(NamedTuple):
    """What one consumer has: its number and queries; of each row of these the position, and ALiBi's slope, or None."""

    consumer: Array
    q: Any
    positions: Array
    slopes: Array | None


@dataclass(frozen=True)
class Kernel:
    """`cost` is one call's; `interpret` as Pallas has it."""

    shape: Shape
    cost: Cost
    interpret: Any

    def run(self, operands: Operands) -> Any:
        """The output, as `q`; where pages are split of each part in float32, `splits …`, and its log-sum-exps."""
        count, heads, rows, width = operands.q.shape
        splits, out_type = self.shape.splits, jax.ShapeDtypeStruct(operands.q.shape, operands.q.dtype)
        if splits > 1:
            sizes = (splits, count, heads, rows, width), (splits, count, heads, self.shape.rows)
            out_type = tuple(jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes)
        grid = {"head": heads, "block": count, "split": splits}
        name, scratch = "axon_paged_attention", buffers(self.shape, operands)
        kernel = launch(name, self.block, out_type, scratch, grid, self.cost, self.interpret, approx_math=True)
        return kernel(operands)

    def block(self, operands: Operands, *refs: Any) -> None:
        *results, x = refs
        here = place(operands.table, self.shape)
        specialise(
            lambda consumer: self.consume(consumer, here, operands, results, x),
            lambda: produce(self.shape, here, operands.page_table, feeds(operands.cache, x)),
        )

    def consume(self, consumer: Array, here: Place, operands: Operands, results: list[Any], x: Buffers) -> None:
        """Attend with 64 rows, and write their output."""
        part = jnp.int32(0) if self.shape.alternating else consumer
        first, stored = part * ROWS, min(ROWS, operands.q.shape[2])
        q, full = x.q_or_out.at[part], x.q_full.at[part]

        @pl.when(consumer < self.shape.rows // ROWS)
        def _():
            source = operands.q.at[here.block, here.head, pl.ds(first, stored)]
            plgpu.copy_gmem_to_smem(source, q.at[pl.ds(0, stored)], full)

        plgpu.barrier_wait(full)
        own = self.own(consumer, q, first, here, operands)
        running = self.begin(consumer, first, here, operands)
        running = (self.alternate if self.shape.alternating else self.take_turns)(running, own, here, x)
        Output(self.shape, here, consumer, first, stored, results, x).finish(running)

    def alternate(self, running: Running, own: _Own, here: Place, x: Buffers) -> Running:
        """Meet every other tile."""
        first = here.first + own.consumer
        steps = lax.div(here.stop - first + CONSUMERS - 1, jnp.int32(CONSUMERS))
        meet_tile = lambda step, found: self.step(first + step * CONSUMERS, found, own, here, x)  # noqa: E731
        return lax.fori_loop(0, steps, meet_tile, running)

    def take_turns(self, running: Running, own: _Own, here: Place, x: Buffers) -> Running:
        """Meet every tile: one consumer is on the tensor cores while the other has its softmax."""
        pl.when(own.consumer == 1)(lambda: meet(x.turn))
        running = lax.fori_loop(
            here.first, here.stop, lambda at, found: self.step(at, found, own, here, x, lambda: meet(x.turn)), running
        )
        pl.when(own.consumer == 0)(lambda: meet(x.turn))
        return running

    def own(self, consumer: Array, q: Any, row: Array, here: Place, operands: Operands) -> _Own:
        mine = pl.ds(row, ROWS)
        positions = plgpu.load(operands.positions.at[here.block, mine], layout=ROW, optimized=False)
        if operands.slopes is None:
            return _Own(consumer, q, positions, None)
        slopes = plgpu.load(operands.slopes.at[here.head, mine], layout=ROW, optimized=False)
        return _Own(consumer, q, positions, slopes)

    def begin(self, consumer: Array, row: Array, here: Place, operands: Operands) -> Running:
        """Before any key: nothing, or of each row its head's sink, in the one part that has it."""
        width = operands.q.shape[3]
        if operands.tops is None:
            return Running.begin(ROWS, width)
        first = here.split == 0
        if self.shape.alternating:
            first &= consumer == 0
        which = jnp.where(first, 0, 1)
        top = plgpu.load(operands.tops.at[which, here.head, pl.ds(row, ROWS)], layout=ROW, optimized=False)
        total = jnp.where(top > LEAST, filled(ROWS, 1.0), filled(ROWS, 0.0))
        return Running(top, total, zeros(ROWS, width))

    def step(
        self, at: Array, running: Running, own: _Own, here: Place, x: Buffers, turn: Callable[[], None] = lambda: None
    ) -> Running:
        """Meet one tile of keys; `turn` where the other consumer may have the tensor cores, and where it may not."""
        slot = lax.rem(at - here.first, jnp.int32(self.shape.stages))
        plgpu.barrier_wait(x.k_full.at[slot])
        products = self.scaled(multiply(own.q, self.operand(KEYS, slot, own, x), turn), KEYS, slot, x)
        release(x.k_free.at[slot], self.interpret)
        scores, factor = self.scores(products, at, own)
        running, weights = running.meet(self.masked(scores, at, own, here), factor)
        plgpu.barrier_wait(x.v_full.at[slot])
        weights = self.scaled(weights, VALUES, slot, x).astype(own.q.dtype)
        values = self.operand(VALUES, slot, own, x)
        turn()
        sums = multiply_into(running.sums, weights, values, self.interpret)
        release(x.v_free.at[slot], self.interpret)
        return running._replace(sums=sums)

    def operand(self, which: int, slot: Array, own: _Own, x: Buffers) -> Any:
        """A slot's keys or values as they are multiplied."""
        tile = x.rings_or_found[0][which].at[slot]
        return tile if x.wide is None else widen(tile, x.wide.at[own.consumer])

    def scaled(self, tile: Array, which: int, slot: Array, x: Buffers) -> Array:
        """A tile `rows keys` times the scales of a quantised cache: scores by the keys', weights by the values'."""
        if x.scales is None:
            return tile
        return tile * along_columns(plgpu.load(x.scales[which].at[slot], layout=COLUMN), ROWS)

    def scores(self, products: Array, at: Array, own: _Own) -> tuple[Array, float]:
        """Scores of products q·k, and the factor with which they are in base 2."""
        config = self.shape.config
        if config.soft_cap is None and own.slopes is None and config.scale > 0:
            return products, config.scale * LOG2E
        scores = config.finish(products)
        if own.slopes is not None:
            ahead = self.keys() - along_rows(own.positions - at * self.shape.tile, self.shape.tile)
            scores += along_rows(own.slopes, self.shape.tile) * ahead.astype(jnp.float32)
        return scores, LOG2E

    def masked(self, scores: Array, at: Array, own: _Own, here: Place) -> Array:
        """−∞ where a key is not seen, if the tile is partly seen."""
        tile, window = self.shape.tile, self.shape.config.window

        def mask_them(scores):
            last, key = own.positions - at * tile, self.keys()
            seen = key <= along_rows(last, tile)
            if window is not None:
                seen &= key > along_rows(last - window, tile)
            return jnp.where(seen, scores, -jnp.inf)

        return lax.cond(here.partly(at), mask_them, lambda scores: scores, scores)

    def keys(self) -> Array:
        """Of each element of a tile, which of its keys it is of."""
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, self.shape.tile), 1, layout=TILE)
