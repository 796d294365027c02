"""The product kernel: each row by the weight of its group, or by its transpose.

The grid is (tiles of columns, visits, tiles of inner); the last turns fastest. Sums are float32 in VMEM. A visit keeps
its own group's rows of the result's tile, which stays in VMEM while the next visits of the same tile fill the rest.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.grouped_matmul.tiling import VMEM_LIMIT, Problem, Tiles, product_bytes, product_tiles
from axon.kernels.grouped_matmul.visits import row_visits


def product(
    x: Array, w: Array, sizes: Array, *, transposed: bool, tiles: Tiles | None = None, interpret: Any = False
) -> Array:
    """`rows inner` by `groups inner columns` → `rows columns`, zeros where a row is in no group.

    Args:
        transposed: the weight is `groups columns inner`.
        tiles: for tests; those of `product_tiles` by default.
    """
    problem = _problem(x, w, transposed)
    tiles = tiles or product_tiles(problem)
    visits, count = row_visits(sizes, problem.rows, tiles.rows)
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
        partial(_kernel, transposed=transposed, tile_rows=tiles.rows),
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


def _problem(x: Array, w: Array, transposed: bool) -> Problem:
    """The sizes of a product, for its tiles and its cost."""
    (rows, inner), columns = x.shape, w.shape[1 if transposed else 2]
    return Problem(rows, inner, columns, w.shape[0], x.dtype.itemsize, x.dtype.itemsize)


def precision_of(dtype: Any) -> lax.Precision | None:
    """Float32 operands are multiplied as such: the default would round them to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _kernel(tile, source, group, start, stop, x, w, out, total, *, transposed: bool, tile_rows: int):
    visit, inner = pl.program_id(1), pl.program_id(2)
    begin, end = start[visit], stop[visit]

    @pl.when(begin < end)
    def _():
        contracted = (((1,), (1 if transposed else 0,)), ((), ()))
        part = lax.dot_general(
            x[...], w[...], contracted, precision=precision_of(x.dtype), preferred_element_type=jnp.float32
        )
        total[...] = jnp.where(inner == 0, part, total[...] + part)

    @pl.when(inner == pl.num_programs(2) - 1)
    def _():
        fresh = (visit == 0) | (tile[visit] != tile[jnp.maximum(visit - 1, 0)])
        row = tile[visit] * tile_rows + lax.broadcasted_iota(jnp.int32, total.shape, 0)
        others = jnp.where(fresh, 0, out[...].astype(jnp.float32))
        out[...] = jnp.where((row >= begin) & (row < end), total[...], others).astype(out.dtype)
