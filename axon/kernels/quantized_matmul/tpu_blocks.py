"""The quantised product on TPUs where scales change along the contracted dimension.

Blocks are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3), or others. The sum is kept transposed, `columns rows`:
a scale of x, of one row, is then one lane's, and a scale of w that 128 columns share one number, so that a row of
combined scales serves all 128. With `rows columns` each register of a block's product would need combined scales of its
own, a third operation beside their product and its sum. A chunk's blocks are added up in registers, and the sum is read
and written once a tile.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.quantized_matmul.quantize import Quantized, spread
from axon.kernels.quantized_matmul.tiling import LANES, Tiles


def quantized_matmul_in_blocks(
    x: Quantized, w: Quantized, dtype: Any, tiles: Tiles, estimate: pl.CostEstimate, interpret: Any
) -> Array:
    """See `axon.kernels.quantized_matmul.quantized_matmul`; along k there is more than one scale of x or of w."""
    (rows, inner), columns = x.values.shape, w.values.shape[1]
    blocks = max(x.scales.shape[1], w.scales.shape[0])
    grid = (-(-rows // tiles.rows), columns // tiles.columns, inner // tiles.inner)
    count = max(1, tiles.inner * blocks // inner)  # a tile holds whole blocks, or a block whole tiles
    groups = blocks // count
    x_scales = _of_rows(x, groups, count, grid[0] * tiles.rows)
    w_scales = _of_columns(w, groups, count, grid[1])
    shared = w_scales.shape[-1] * LANES == tiles.columns
    call = pl.pallas_call(
        partial(_kernel, count=count, shared=shared),
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=grid,
        in_specs=[
            pl.BlockSpec((tiles.rows, tiles.inner), lambda i, j, k: (i, k)),
            pl.BlockSpec((tiles.inner, tiles.columns), lambda i, j, k: (k, j)),
            pl.BlockSpec((None, count, tiles.rows), lambda i, j, k: (k * groups // grid[2], 0, i)),
            pl.BlockSpec(
                (None, None, *w_scales.shape[2:]),
                lambda i, j, k: (k * groups // grid[2], j, 0, 0),
                memory_space=pltpu.SMEM if shared else pltpu.VMEM,
            ),
        ],
        out_specs=pl.BlockSpec((tiles.rows, tiles.columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((tiles.columns, tiles.rows), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=estimate,
        interpret=interpret,
        name="quantized_matmul",
    )
    return call(x.values, w.values, x_scales, w_scales)


def _of_rows(x: Quantized, groups: int, count: int, padded: int) -> Array:
    """`groups count rows` of x's scales, with rows up to whole tiles."""
    rows = x.values.shape[0]
    scales = jnp.pad(spread(x.scales, rows, groups * count).T, ((0, 0), (0, padded - rows)))
    return scales.reshape(groups, count, padded)


def _of_columns(w: Quantized, groups: int, count: int, tiles: int) -> Array:
    """`groups tiles count each` of w's scales: one for each 128 columns where these share one, else one a column."""
    columns = w.values.shape[1]
    shared = columns // w.scales.shape[1] % LANES == 0
    scales = spread(w.scales, groups * count, columns // LANES if shared else columns)
    return scales.reshape(groups, count, tiles, -1).swapaxes(1, 2)


def _kernel(x, w, x_scales, w_scales, out, total, *, count: int, shared: bool):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    for chunk in range(total.shape[0] // LANES):
        columns = slice(chunk * LANES, (chunk + 1) * LANES)
        transposed = w[:, columns].T  # in 8 bits, once for all blocks
        part = total[columns, :]
        for i in range(count):
            block = slice(i * x.shape[1] // count, (i + 1) * x.shape[1] // count)
            scale = w_scales[i, chunk] if shared else w_scales[i : i + 1, columns].T
            part += _dot(transposed[:, block], x[:, block]) * (x_scales[i : i + 1, :] * scale)
        total[columns, :] = part

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out[...] = total[...].T.astype(out.dtype)


def _dot(w: Array, x: Array) -> Array:
    """`columns inner` and `rows inner`: `columns rows`, float32."""
    wide = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=wide).astype(jnp.float32)
