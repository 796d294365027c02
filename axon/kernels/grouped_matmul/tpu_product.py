"""The product kernel: each row by the weight of its group, or by its transpose.

The grid is (tiles of columns, visits, tiles of inner); the last turns fastest. Sums are float32. A visit multiplies the
pieces of its tile that have rows of its group, and keeps those rows of the result's tile, which stays in VMEM while the
next visits of the same tile fill the rest.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.grouped_matmul.pieces import Pieces, cover, for_each_chunk, for_each_piece
from axon.kernels.grouped_matmul.tiling import VMEM_LIMIT, Problem, Tiles, product_bytes, product_pieces, product_tiles
from axon.kernels.grouped_matmul.visits import row_visits

CHUNK = 2**22
"""Bytes of a weight's tile, about, that a piece of rows smaller than the whole is multiplied with at a time."""


def product(
    x: Array,
    w: Array,
    sizes: Array,
    *,
    transposed: bool,
    first: Array | int = 0,
    tiles: Tiles | None = None,
    interpret: Any = False,
) -> Array:
    """`rows inner` by `groups inner columns` → `rows columns`, zeros where a row is in no group.

    Args:
        transposed: the weight is `groups columns inner`.
        first: the number of group 0's weight, where there are more than the groups have.
        tiles: for tests; those of `product_tiles` by default.
    """
    problem = _problem(x, w, sizes, transposed)
    tiles = tiles or product_tiles(problem)
    visits, count = row_visits(sizes, problem.rows, tiles.rows)
    visits = visits._replace(group=visits.group + first)
    steps = problem.inner // tiles.inner

    def inner_tile(visit, inner, start, stop):
        return jnp.where(start[visit] < stop[visit], inner, steps - 1)  # what is there already, if nothing is read

    def x_tile(column, visit, inner, tile, source, group, start, stop):
        return source[visit], inner_tile(visit, inner, start, stop)

    def w_tile(column, visit, inner, tile, source, group, start, stop):
        inner = inner_tile(visit, inner, start, stop)
        return (group[visit], column, inner) if transposed else (group[visit], inner, column)

    w_shape = (tiles.columns, tiles.inner) if transposed else (tiles.inner, tiles.columns)
    call = pl.pallas_call(
        partial(_kernel, transposed=transposed, pieces=product_pieces(problem, tiles)),
        out_shape=jax.ShapeDtypeStruct((problem.rows, problem.columns), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(problem.columns // tiles.columns, count, steps),
            in_specs=[pl.BlockSpec((tiles.rows, tiles.inner), x_tile), pl.BlockSpec((None, *w_shape), w_tile)],
            out_specs=pl.BlockSpec(
                (tiles.rows, tiles.columns), lambda column, visit, _, tile, *__: (tile[visit], column)
            ),
            scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.columns), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=problem.flops, bytes_accessed=product_bytes(problem, tiles), transcendentals=0
        ),
        interpret=interpret,
        name="grouped_matmul_transposed" if transposed else "grouped_matmul",
    )
    return call(*visits, x, w)


def _problem(x: Array, w: Array, sizes: Array, transposed: bool) -> Problem:
    """The sizes of a product, for its tiles and its cost."""
    (rows, inner), columns = x.shape, w.shape[1 if transposed else 2]
    of_x = x.dtype.itemsize
    return Problem(rows, inner, columns, sizes.shape[0], of_x, of_x, w.dtype.itemsize)


def precision_of(dtype: Any) -> lax.Precision | None:
    """Float32 operands are multiplied as such: the default would round them to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _kernel(tile, source, group, start, stop, x, w, out, total, *, transposed: bool, pieces: Pieces):
    visit, inner = pl.program_id(1), pl.program_id(2)
    rows, columns = out.shape
    origin = tile[visit] * rows
    low, high = (jnp.clip(edge[visit] - origin, 0, rows) for edge in (start, stop))
    fresh = (visit == 0) | (tile[visit] != tile[jnp.maximum(visit - 1, 0)])

    @pl.when(fresh & (inner == 0) & (high - low < rows))
    def _():
        out[...] = jnp.zeros_like(out)

    def piece(at, size):
        here = pl.ds(at, size)

        def chunk(lanes):
            sums = lax.dot_general(
                x[here, :],
                (w[lanes, :] if transposed else w[:, lanes]).astype(x.dtype),
                (((1,), (1 if transposed else 0,)), ((), ())),
                precision=precision_of(x.dtype),
                preferred_element_type=jnp.float32,
            )
            total[here, lanes] = jnp.where(inner == 0, sums, total[here, lanes] + sums)
            pl.when(inner == pl.num_programs(2) - 1)(lambda: _keep(total, out, here, lanes, low - at, high - at))

        for_each_chunk(columns, columns if size == pieces.whole else chunk_columns(x), chunk)

    for_each_piece(cover(low, high, rows, pieces), rows, pieces, piece)


def _keep(total, out, here: pl.Slice, lanes: pl.Slice, low: Array, high: Array):
    """Writes the rows `[low, high)` of a piece: the others are another group's, or no group's."""
    is_own = (low <= 0) & (high >= here.size)

    @pl.when(is_own)
    def _():
        out[here, lanes] = total[here, lanes].astype(out.dtype)

    @pl.when(jnp.logical_not(is_own))
    def _():
        sums, others = total[here, lanes], out[here, lanes].astype(jnp.float32)
        row = lax.broadcasted_iota(jnp.int32, sums.shape, 0)
        out[here, lanes] = jnp.where((row >= low) & (row < high), sums, others).astype(out.dtype)


def chunk_columns(x: Any) -> int:
    """Columns that a piece of rows smaller than the whole multiplies at a time: enough that filling the matrix unit
    anew costs little, and few enough that the code of all sizes stays near that of one tile."""
    return max(CHUNK // (x.shape[1] * x.dtype.itemsize) // 256, 1) * 256
