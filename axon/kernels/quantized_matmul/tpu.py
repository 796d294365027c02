"""The quantised product on TPUs: a Pallas kernel over tiles of rows, of out and of the contracted dimension.

Where scales do not change along the contracted dimension, int8 is summed in int32 and fp8 in float32, and scaled once
at the end. Where they do, a kernel of their own scales each block's product: see `tpu_blocks.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.quantized_matmul.quantize import MOST_PRODUCTS, Quantized, broadcast_scales
from axon.kernels.quantized_matmul.tiling import LANES, Tiles, bytes_moved, tiles_of
from axon.kernels.quantized_matmul.tpu_blocks import quantized_matmul_in_blocks


def unfit(x: Quantized, w: Quantized) -> str | None:
    """Why the kernel cannot do this product; None if it can."""
    (rows, inner), columns = x.values.shape, w.values.shape[1]
    block = inner // max(x.scales.shape[1], w.scales.shape[0])
    if not rows:
        return "there are no rows"
    if inner % LANES or columns % LANES:
        return f"k and out are multiples of {LANES}, not {inner} and {columns}"
    if inner > MOST_PRODUCTS:
        return f"a sum of {inner} products of int8 does not fit int32"
    if block % LANES:
        return f"scales along k are of blocks that are multiples of {LANES}, not {block}"
    return None


def quantized_matmul_tpu(
    x: Quantized, w: Quantized, dtype: Any, *, largest: Tiles = Tiles(), interpret: Any = False
) -> Array:
    """See `axon.kernels.quantized_matmul.quantized_matmul`.

    Args:
        largest: tiles are no larger, and divide k and out.
    """
    (rows, inner), columns = x.values.shape, w.values.shape[1]
    blocks = max(x.scales.shape[1], w.scales.shape[0])
    tiles = tiles_of(rows, inner, columns, blocks, largest)
    estimate = pl.CostEstimate(
        flops=2 * rows * inner * columns,
        bytes_accessed=bytes_moved(rows, inner, columns, blocks, jnp.dtype(dtype).itemsize, tiles),
        transcendentals=0,
    )
    product = quantized_matmul_in_blocks if blocks > 1 else _quantized_matmul_whole
    return product(x, w, dtype, tiles, estimate, interpret)


def _quantized_matmul_whole(
    x: Quantized, w: Quantized, dtype: Any, tiles: Tiles, estimate: pl.CostEstimate, interpret: Any
) -> Array:
    """Of operands whose scales do not change along the contracted dimension."""
    (rows, inner), columns = x.values.shape, w.values.shape[1]
    call = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=(-(-rows // tiles.rows), columns // tiles.columns, inner // tiles.inner),
        in_specs=[
            pl.BlockSpec((tiles.rows, tiles.inner), lambda i, j, k: (i, k)),
            pl.BlockSpec((tiles.inner, tiles.columns), lambda i, j, k: (k, j)),
            pl.BlockSpec((tiles.rows, 1), lambda i, j, k: (i, 0)),
            pl.BlockSpec((1, tiles.columns), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((tiles.rows, tiles.columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.columns), _wide(x.values))],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=estimate,
        interpret=interpret,
        name="quantized_matmul",
    )
    return call(x.values, w.values, *broadcast_scales(x, w))


def _kernel(x, w, x_scales, w_scales, out, total):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += lax.dot_general(x[...], w[...], (((1,), (0,)), ((), ())), preferred_element_type=total.dtype)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out[...] = (total[...].astype(jnp.float32) * (x_scales[...] * w_scales[...])).astype(out.dtype)


def _wide(values: Array) -> Any:
    return jnp.int32 if values.dtype == jnp.int8 else jnp.float32
