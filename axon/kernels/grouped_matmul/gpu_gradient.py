"""The weights' gradient kernel for Hopper: for each group the product of its rows of x, transposed, with those of dy.

A unit of work is a tile of 128 of embed by a tile of out, of one group: its rows pass, 64 at a time, and each of two
consumers has the sums of 64 of embed in its registers. Rows of others in the group's first and last tile are cleared.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.cost import Cost
from axon.kernels.grouped_matmul.gpu_block import DEPTH, Buffers, Kernel, store
from axon.kernels.grouped_matmul.gpu_support import sizes_for
from axon.kernels.grouped_matmul.gpu_units import ALIGNED, padded
from axon.kernels.grouped_matmul.visits import edges
from axon.kernels.hopper import multiprocessors
from axon.kernels.warpgroups import CONSUMERS, ROWS, launch, meet, meeting_point
from axon.kernels.wgmma import TILE

EMBED = CONSUMERS * ROWS
"""Of embed, in a unit."""


def weight_gradient(
    x: Array, dy: Array, sizes: Array, *, dtype: Any, interpret: Any = False, blocks: int | None = None
) -> Array:
    """`rows embed` and `rows out` → `groups embed out` in `dtype`, summed in float32.

    Args:
        blocks: for tests; one for each multiprocessor by default.
    """
    (rows, embed), out = x.shape, dy.shape[1]
    kernel = _WeightGradient(sizes_for(out), blocks or multiprocessors(), interpret)
    dw = jax.ShapeDtypeStruct((sizes.shape[0], embed, out), dtype)
    buffers = kernel.buffers((DEPTH, EMBED), (DEPTH, kernel.sizes.columns), x.dtype, dtype), meeting_point()
    cost = Cost(2 * rows * embed * out, (x.size + dy.size) * x.dtype.itemsize + dw.size * dw.dtype.itemsize)
    name = "axon_grouped_matmul_weight_gradient"
    run = launch(name, kernel.block, dw, buffers, {"block": kernel.blocks}, cost, interpret)
    return run(jnp.stack(edges(sizes, rows), axis=1), padded(x), padded(dy))


class _Unit(NamedTuple):
    """A tile of the result, by the first of its embed and of its out, and the rows over which it sums."""

    group: Array
    embed: Array
    out: Array
    start: Array
    stop: Array

    @property
    def first(self) -> Array:
        """Of the first tile of rows."""
        return lax.div(self.start, jnp.int32(ALIGNED)) * ALIGNED

    @property
    def steps(self) -> Array:
        tiles = lax.div(self.stop - self.first + (DEPTH - 1), jnp.int32(DEPTH))
        return jnp.where(self.start < self.stop, tiles, 0)


@dataclass(frozen=True)
class _WeightGradient(Kernel):
    def block(self, spans, x, dy, dw, buffers: tuple[Buffers, Any]):
        down, across = dw.shape[1] // EMBED, dw.shape[2] // self.sizes.columns

        def unit(at):
            """Tiles of embed turn fastest, so that blocks that run together read the same columns of dy."""
            group, tile = lax.div(at, jnp.int32(down * across)), lax.rem(at, jnp.int32(down * across))
            embed, out = lax.rem(tile, jnp.int32(down)) * EMBED, lax.div(tile, jnp.int32(down)) * self.sizes.columns
            return _Unit(group, embed, out, spans[group, 0], spans[group, 1])

        self.work(
            jnp.int32(dw.shape[0] * down * across),
            lambda at, done: self.produce(unit(at), done, x, dy, buffers[0]),
            lambda consumer, at, done: self.consume(consumer, unit(at), done, dw, *buffers),
        )

    def produce(self, unit: _Unit, done: Array, x, dy, buffers: Buffers) -> Array:
        """Copy the tiles of rows."""

        @pl.loop(0, unit.steps)
        def _(step):
            rows = pl.ds(unit.first + step * DEPTH, DEPTH)
            left, right = x.at[rows, pl.ds(unit.embed, EMBED)], dy.at[rows, pl.ds(unit.out, self.sizes.columns)]
            self.copy(left, right, done + step, buffers)

        return done + unit.steps

    def consume(self, consumer: Array, unit: _Unit, done: Array, dw, buffers: Buffers, cleared: Any) -> Array:
        """Sum 64 of embed over the group's rows, and write them: zeros for an empty group."""
        half = self.sizes.columns // CONSUMERS
        mine, my_half = pl.ds(consumer * ROWS, ROWS), pl.ds(consumer * half, half)

        def operands(step, slot):
            low, high = (edge - unit.first - step * DEPTH for edge in (unit.start, unit.stop))
            left, right = buffers.left.at[slot, :, mine], buffers.right.at[slot]

            @pl.when((low > 0) | (high < DEPTH))
            def _():
                clear(left, low, high)
                clear(buffers.right.at[slot, :, my_half], low, high)
                plgpu.commit_smem()
                meet(cleared)

            return left.transpose((1, 0)), right

        def copy(chunk, columns):
            embed = pl.ds(unit.embed + consumer * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(chunk, dw.at[unit.group, embed, pl.ds(unit.out + columns.start, columns.size)])

        total = self.sums(done, unit.steps, operands, buffers)
        store(total, buffers.staged.at[consumer], copy)
        return done + unit.steps


def clear(tile: Any, low: Array, high: Array) -> None:
    """Zeros but for rows `[low, high)`: the others are another group's, or past the last, and may hold anything."""
    row = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=TILE)
    found = plgpu.load(tile, layout=TILE)
    tile[...] = jnp.where((row >= low) & (row < high), found, jnp.zeros_like(found))
