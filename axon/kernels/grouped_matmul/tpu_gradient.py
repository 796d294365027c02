"""The weights' gradient kernel: for each group the product of its rows of x, transposed, with its rows of dy.

The grid is (tiles of embed, tiles of out, visits); visits turn fastest, and those of a group follow each other, so its
sum stays in float32 in VMEM until its last visit writes it. A visit's tile begins with the 8 rows in which its group
does, so that only a group's last is not whole. An empty group has one visit, which writes zeros.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.grouped_matmul.pieces import SUBLANES, Pieces, cover, for_each_chunk, for_each_piece
from axon.kernels.grouped_matmul.tiling import (
    LANES,
    VMEM_LIMIT,
    Problem,
    Tiles,
    gradient_bytes,
    gradient_pieces,
    gradient_tiles,
)
from axon.kernels.grouped_matmul.tpu_product import precision_of
from axon.kernels.grouped_matmul.visits import group_visits

CHUNK = 2**21
"""As of `tpu_product`, of the tile of x."""


def weight_gradient(
    x: Array, dy: Array, sizes: Array, *, dtype: Any, tiles: Tiles | None = None, interpret: Any = False
) -> Array:
    """`rows embed` and `rows out` → `groups embed out` in `dtype`, summed in float32.

    Args:
        tiles: for tests; those of `gradient_tiles` by default.
    """
    (rows, embed), out = x.shape, dy.shape[1]
    problem = Problem(rows, embed, out, sizes.shape[0], x.dtype.itemsize, jnp.dtype(dtype).itemsize)
    tiles = tiles or gradient_tiles(problem)
    x, dy = (_padded(operand, tiles.rows) for operand in (x, dy))
    visits, count = group_visits(sizes, rows, tiles.rows)

    def operand_spec(columns: int, place: int) -> pl.BlockSpec:
        def tile(*indices):
            eighth = indices[3]
            return eighth[indices[2]] * SUBLANES, indices[place] * columns

        return pl.BlockSpec((pl.Element(tiles.rows), pl.Element(columns)), tile)

    call = pl.pallas_call(
        partial(_kernel, pieces=gradient_pieces(tiles)),
        out_shape=jax.ShapeDtypeStruct((problem.groups, problem.inner, problem.columns), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(problem.inner // tiles.inner, problem.columns // tiles.columns, count),
            in_specs=[operand_spec(tiles.inner, 0), operand_spec(tiles.columns, 1)],
            out_specs=pl.BlockSpec(
                (None, tiles.inner, tiles.columns), lambda i, j, visit, _, group, *__: (group[visit], i, j)
            ),
            scratch_shapes=[pltpu.VMEM((tiles.inner, tiles.columns), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=problem.flops, bytes_accessed=gradient_bytes(problem, tiles), transcendentals=0
        ),
        interpret=interpret,
        name="grouped_matmul_weight_gradient",
    )
    return call(*visits, x, dy)


def _padded(operand: Array, tile: int) -> Array:
    """With rows to a multiple of the registers', and a tile of them at least, so that each tile is within the array."""
    rows = operand.shape[0]
    return jnp.pad(operand, ((0, max(-rows % SUBLANES, tile - rows)), (0, 0)))


def _kernel(eighth, group, start, stop, x, dy, out, total, *, pieces: Pieces):
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    (rows, inner), columns, mine = x.shape, dy.shape[1], group[visit]
    low, high = (edge[visit] - eighth[visit] * SUBLANES for edge in (start, stop))
    is_first = (visit == 0) | (group[jnp.maximum(visit - 1, 0)] != mine)

    def piece(at, size):
        here = pl.ds(at, size)
        left = _own(x[here, :], low - at, high - at)

        def chunk(lanes):
            right = _own(dy[here, lanes], low - at, high - at)
            sums = lax.dot_general(
                left,
                right,
                (((0,), (0,)), ((), ())),
                precision=precision_of(left.dtype),
                preferred_element_type=jnp.float32,
            )
            total[:, lanes] = jnp.where(is_first, 0, total[:, lanes]) + sums

        width = max(CHUNK // (inner * x.dtype.itemsize) // LANES, 1) * LANES
        for_each_chunk(columns, columns if size == pieces.whole else width, chunk)

    for_each_piece(cover(low, high, rows, pieces), rows, pieces, piece)
    ends = (visit == last) | (group[jnp.minimum(visit + 1, last)] != mine)

    @pl.when(ends & (low < high))
    def _():
        out[...] = total[...].astype(out.dtype)

    @pl.when(low >= high)
    def _():
        out[...] = jnp.zeros_like(out)


def _own(rows: Array, begin: Array, end: Array) -> Array:
    """Zeros in the rows of other groups, and in those past the array's end, which may hold anything."""
    row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where((row >= begin) & (row < end), rows, jnp.zeros_like(rows))
