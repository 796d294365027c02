"""The Hopper kernel of the quantised product, with two levels of sums (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).

A block of threads computes one tile of the result after the other: a producer warpgroup copies 128 of k at a time to
shared memory by TMA; each of two consumer warpgroups has 64 rows of the tile, whose sums stay in its registers. The
tensor cores sum fp8 in fewer bits than float32 has: so what they sum is 128 of k, which is then scaled and added to
float32 sums, while the other consumer is on the tensor cores.
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
from axon.kernels.quantized_matmul.gpu_support import PIECE, STEP
from axon.kernels.warpgroups import CONSUMERS, ROWS, free_barriers, full_barriers, launch, release, specialise, stream
from axon.kernels.wgmma import COLUMN, ROW, along_columns, along_rows, multiply, shared, sum_dtype, zeros

NEIGHBOURS = 8
"""Tiles of columns that are computed at about the same time for a tile of rows, so that the L2 cache has both."""

REGISTERS = 208
"""Of a consumer's thread: 128 for sums, 64 for a piece's product, and the rest. With 232 the compiler begins more at
once, and spills."""


class Operands(NamedTuple):
    """Values in 8 bits, in the tiles of shared memory, and scales in float32.

    Attributes:
        x: `rows/64 64 k`. w: `out/128 128 k`.
        x_steps, w_steps: scales that change along k, `steps rows` and `out/128 steps`; None if they do not.
        x_scales, w_scales: scales that do not, `rows` and `out`; None if they do.
    """

    x: Any
    w: Any
    x_steps: Any
    w_steps: Any
    x_scales: Any
    w_scales: Any

    @property
    def steps(self) -> int:
        """Of 128 along k."""
        return self.x.shape[2] // STEP

    @property
    def sums(self) -> Any:
        """The dtype in which parts are summed: int32 where no scale comes between those of int8."""
        return sum_dtype(self.x.dtype) if self.x_steps is None and self.w_steps is None else jnp.float32


class _Buffers(NamedTuple):
    """Shared memory of a block, and the barriers on which its warpgroups meet."""

    x: Any
    w: Any
    out: Any
    full: Any
    free: Any


class _Tile(NamedTuple):
    """A tile of rows and of columns, and how many steps this block has done before it."""

    row: Array
    column: Array
    before: Array


@dataclass(frozen=True)
class Product:
    """A product in tiles of 128 rows and of `pieces` × 128 columns.

    Args:
        stages: of how many steps shared memory holds the operands.
        dtype: of the result. cost: of a call. blocks: of threads, at most. interpret: as Pallas has it.
    """

    pieces: int
    stages: int
    dtype: Any
    cost: Cost
    blocks: int
    interpret: Any

    def run(self, operands: Operands) -> Array:
        """`rows out`."""

        rows, columns = self.tiles(operands)
        out_type = jax.ShapeDtypeStruct((operands.x.shape[0] * ROWS, operands.w.shape[0] * PIECE), self.dtype)
        grid = {"block": min(self.blocks, rows * columns)}
        buffers = self.buffers(operands.x.dtype)
        return launch("axon_quantized_matmul", self.block, out_type, buffers, grid, self.cost, self.interpret)(operands)

    def tiles(self, operands: Operands) -> tuple[int, int]:
        """How many of rows and of columns."""
        return operands.x.shape[0] // CONSUMERS, operands.w.shape[0] // self.pieces

    def buffers(self, values: Any) -> _Buffers:
        return _Buffers(
            shared(self.stages, CONSUMERS, ROWS, STEP, dtype=values),
            shared(self.stages, self.pieces, PIECE, STEP, dtype=values),
            shared(CONSUMERS, ROWS, PIECE, dtype=self.dtype),
            full_barriers(2, self.stages),
            free_barriers(self.stages),
        )

    def block(self, operands: Operands, out: Any, x: _Buffers) -> None:
        def consume(consumer):
            self.visit(operands, lambda tile: self.consume(consumer, tile, operands, out, x))
            plgpu.wait_smem_to_gmem(0)

        specialise(consume, lambda: self.visit(operands, lambda tile: self.produce(tile, operands, x)), REGISTERS)

    def visit(self, operands: Operands, do: Callable[[_Tile], None]) -> None:
        """`do` each tile of this block."""
        tiles = self.tiles(operands)

        @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
        def _(loop):
            row, column = plgpu.planar_snake(loop.index[0], tiles, 1, NEIGHBOURS)
            do(_Tile(row, column, jnp.int32(loop.local_index * operands.steps)))

    def produce(self, tile: _Tile, operands: Operands, x: _Buffers) -> None:
        """Copy the tile's operands step by step, as shared memory becomes free, even before the last tile is done."""
        rows, pieces = pl.ds(tile.row * CONSUMERS, CONSUMERS), pl.ds(tile.column * self.pieces, self.pieces)

        @pl.loop(0, operands.steps)
        def _(step):
            k, at = pl.ds(step * STEP, STEP), tile.before + step
            copies = [(operands.x.at[rows, :, k], x.x), (operands.w.at[pieces, :, k], x.w)]
            stream(copies, lax.rem(at, jnp.int32(self.stages)), x.full, x.free, at >= self.stages)

    def consume(self, consumer: Array, tile: _Tile, operands: Operands, out: Any, x: _Buffers) -> None:
        """Sum the products of 64 rows, and write them."""
        row, staged = (tile.row * CONSUMERS + consumer) * ROWS, x.out.at[consumer]
        sums = lax.fori_loop(
            0,
            operands.steps,
            lambda step, sums: self.step(step, sums, consumer, tile, row, operands, x),
            (zeros(ROWS, PIECE, dtype=operands.sums),) * self.pieces,
        )
        for piece, total in enumerate(sums):
            column = (tile.column * self.pieces + piece) * PIECE
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the piece before it
            staged[...] = _scaled(total.astype(jnp.float32), row, column, operands).astype(self.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(row, ROWS), pl.ds(column, PIECE)])

    def step(self, step, sums, consumer: Array, tile: _Tile, row: Array, operands: Operands, x: _Buffers):
        """Add the products of 128 of k, piece by piece.

        Scales are loaded before the wait for values, in which they arrive.
        """
        slot = lax.rem(tile.before + step, jnp.int32(self.stages))
        of_rows = None if operands.x_steps is None else _of_rows(operands.x_steps.at[step], row)
        scales = [_scale(operands.w_steps, tile.column * self.pieces + n, step) for n in range(self.pieces)]
        plgpu.barrier_wait(x.full.at[slot])
        added = []
        for piece, (total, scale) in enumerate(zip(sums, scales, strict=True)):
            part = multiply(x.x.at[slot, consumer], x.w.at[slot, piece]).astype(operands.sums)
            added.append(total + _times(part, of_rows, scale))
        release(x.free.at[slot], self.interpret)
        return tuple(added)


def _of_rows(scales: Any, row: Array) -> Array:
    return plgpu.load(scales.at[pl.ds(row, ROWS)], layout=ROW, optimized=False)


def _scale(w_steps: Any, piece: Array, step: Array) -> Array | None:
    return None if w_steps is None else w_steps[piece, step]


def _times(part: Array, of_rows: Array | None, scale: Array | None) -> Array:
    """The part at the scales that change along k."""
    if of_rows is None:
        return part if scale is None else part * scale
    return part * along_rows(of_rows if scale is None else of_rows * scale, PIECE)


def _scaled(total: Array, row: Array, column: Array, operands: Operands) -> Array:
    """The sum at the scales that do not change along k."""
    if operands.x_scales is not None:
        total *= along_rows(_of_rows(operands.x_scales, row), PIECE)
    if operands.w_scales is not None:
        of_columns = plgpu.load(operands.w_scales.at[pl.ds(column, PIECE)], layout=COLUMN, optimized=False)
        total *= along_columns(of_columns, ROWS)
    return total
