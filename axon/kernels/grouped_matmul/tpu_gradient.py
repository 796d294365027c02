"""The weights' gradient kernel: for each group the product of its rows of x, transposed, with its rows of dy.

The grid is (tiles of embed, tiles of out, visits); visits turn fastest, and those of a group follow each other, so its
sum stays in float32 in VMEM until its last visit writes it. An empty group has one visit, which writes zeros.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.grouped_matmul.tiling import VMEM_LIMIT, Problem, Tiles, gradient_bytes, gradient_tiles
from axon.kernels.grouped_matmul.tpu_product import precision_of
from axon.kernels.grouped_matmul.visits import group_visits


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
    visits, count = group_visits(sizes, problem.rows, tiles.rows)
    call = pl.pallas_call(
        partial(_kernel, tile_rows=tiles.rows),
        out_shape=jax.ShapeDtypeStruct((problem.groups, problem.inner, problem.columns), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(problem.inner // tiles.inner, problem.columns // tiles.columns, count),
            in_specs=[
                pl.BlockSpec((tiles.rows, tiles.inner), lambda i, j, visit, _, source, *__: (source[visit], i)),
                pl.BlockSpec((tiles.rows, tiles.columns), lambda i, j, visit, _, source, *__: (source[visit], j)),
            ],
            out_specs=pl.BlockSpec(
                (None, tiles.inner, tiles.columns), lambda i, j, visit, _, __, group, *___: (group[visit], i, j)
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


def _kernel(tile, source, group, start, stop, x, dy, out, total, *, tile_rows: int):
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    mine = group[visit]

    @pl.when((visit == 0) | (group[jnp.maximum(visit - 1, 0)] != mine))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(start[visit] < stop[visit])
    def _():
        first = source[visit] * tile_rows
        left = _own(x[...], start[visit] - first, stop[visit] - first)
        right = _own(dy[...], start[visit] - first, stop[visit] - first)
        total[...] += lax.dot_general(
            left,
            right,
            (((0,), (0,)), ((), ())),
            precision=precision_of(left.dtype),
            preferred_element_type=jnp.float32,
        )

    @pl.when((visit == last) | (group[jnp.minimum(visit + 1, last)] != mine))
    def _():
        out[...] = total[...].astype(out.dtype)


def _own(rows: Array, begin: Array, end: Array) -> Array:
    """Zeros in the rows of other groups, and in those past the array's end, which may hold anything."""
    row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where((row >= begin) & (row < end), rows, jnp.zeros_like(rows))
