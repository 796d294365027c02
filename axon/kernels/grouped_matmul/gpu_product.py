"""The product kernel for Hopper: each row by the weight of its group, or by its transpose.

A unit of work is a tile of 128 rows of one group by a tile of columns. A producer warpgroup copies tiles of x and of
the group's weight by TMA, ahead into the next unit; each of two consumers has the sums of 64 rows in its registers.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.cost import Cost
from axon.kernels.grouped_matmul.gpu_block import DEPTH, Buffers, Kernel, store
from axon.kernels.grouped_matmul.gpu_support import sizes_for
from axon.kernels.grouped_matmul.gpu_units import COLUMN, GROUP, ROW, START, STOP, padded, product_units
from axon.kernels.hopper import multiprocessors
from axon.kernels.warpgroups import CONSUMERS, ROWS, launch

TILE = CONSUMERS * ROWS
"""Rows of a unit."""


def product(
    x: Array, w: Array, sizes: Array, *, transposed: bool, interpret: Any = False, blocks: int | None = None
) -> Array:
    """`rows inner` by `groups inner columns` → `rows columns`, zeros where a row is in no group.

    Args:
        transposed: the weight is `groups columns inner`.
        blocks: for tests; one for each multiprocessor by default.
    """
    (rows, inner), columns = x.shape, w.shape[1 if transposed else 2]
    kernel = _Product(sizes_for(columns), blocks or multiprocessors(), interpret, transposed)
    width = kernel.sizes.columns
    name = "axon_grouped_matmul" + "_transposed" * transposed
    out = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    buffers = kernel.buffers((TILE, DEPTH), (width, DEPTH) if transposed else (DEPTH, width), x.dtype, x.dtype)
    cost = Cost(2 * rows * inner * columns, (x.size + w.size + rows * columns) * x.dtype.itemsize)
    run = launch(name, kernel.block, out, buffers, {"block": kernel.blocks}, cost, interpret)
    return run(*product_units(sizes, rows, TILE, columns // width), padded(x), w)


class _Unit(NamedTuple):
    """A row of the table, the first of its columns, and over how many steps it sums: none for the rows of no group."""

    group: Array
    row: Array
    start: Array
    stop: Array
    column: Array
    steps: Array


@dataclass(frozen=True)
class _Product(Kernel):
    transposed: bool

    def block(self, table, count, x, w, out, buffers: Buffers):
        self.work(
            count[0],
            lambda at, done: self.produce(self.unit(table, at, w), done, x, w, buffers),
            lambda consumer, at, done: self.consume(consumer, self.unit(table, at, w), done, out, buffers),
        )

    def unit(self, table, at: Array, w) -> _Unit:
        group, row, start, stop, column = (table[at, part] for part in (GROUP, ROW, START, STOP, COLUMN))
        steps = jnp.where(group < w.shape[0], w.shape[2 if self.transposed else 1] // DEPTH, 0)
        return _Unit(group, row, start, stop, column * self.sizes.columns, steps)

    def produce(self, unit: _Unit, done: Array, x, w, buffers: Buffers) -> Array:
        """Copy the tiles of x and of the weight."""

        @pl.loop(0, unit.steps)
        def _(step):
            inner, columns = pl.ds(step * DEPTH, DEPTH), pl.ds(unit.column, self.sizes.columns)
            weight = w.at[unit.group, columns, inner] if self.transposed else w.at[unit.group, inner, columns]
            self.copy(x.at[pl.ds(unit.row, TILE), inner], weight, done + step, buffers)

        return done + unit.steps

    def consume(self, consumer: Array, unit: _Unit, done: Array, out, buffers: Buffers) -> Array:
        """Multiply 64 rows, if the group has any of them, and write those that it has."""
        first = unit.row + consumer * ROWS
        low, high = jnp.maximum(unit.start - first, 0), jnp.minimum(unit.stop - first, ROWS)
        steps = jnp.where(low < high, unit.steps, 0)

        def operands(_, slot):
            weight = buffers.right.at[slot]
            rows = buffers.left.at[slot, pl.ds(consumer * ROWS, ROWS)]
            return rows, weight.transpose((1, 0)) if self.transposed else weight

        def copy(chunk, columns):
            place = out.at[:, pl.ds(unit.column + columns.start, columns.size)]
            copy_rows(chunk, place, low, high - low, first)

        total = self.sums(done, steps, operands, buffers)
        self.skip(done + steps, unit.steps - steps, buffers)
        pl.when(low < high)(lambda: store(total, buffers.staged.at[consumer], copy))
        return done + unit.steps


def copy_rows(chunk: Any, out: Any, low: Array, count: Array, first: Array) -> None:
    """Copy `count` rows of a chunk of 64, from row `low` on, to where its row 0 is row `first` of `out`.

    TMA copies a number of rows that is known when it is compiled: those of each bit of `count`. How a row is swizzled
    follows from its address, so that it may be copied without the others of its 8.
    """
    for size in (64, 32, 16, 8, 4, 2, 1):
        row = low + (count & -2 * size)
        copy = partial(plgpu.copy_smem_to_gmem, chunk.at[pl.ds(row, size)], out.at[pl.ds(first + row, size)])
        pl.when(count & size != 0)(copy)
