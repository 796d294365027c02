"""The quantised product on TPUs: a Pallas kernel over tiles of rows, of out and of the contracted dimension.

Where scales do not change along the contracted dimension, int8 is summed in int32 and fp8 in float32, and scaled once
at the end. Where they do (DeepSeek-V3, arXiv:2412.19437, section 3.3), each block's product is scaled as it is added
to a float32 sum.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.quantized_matmul.quantize import MOST_PRODUCTS, Quantized
from axon.kernels.quantized_matmul.scales import broadcast_scales

LANES = 128
"""The contracted dimension, its blocks and the columns are multiples of it."""

SUBLANES = 32
"""Rows of 8-bit values a vector register: tiles of rows are multiples of it."""


class Tiles(NamedTuple):
    """Of rows, of the contracted dimension, and of columns.

    1,024 products of int8 add up to at most 2²⁴, so that a chip that multiplies them as floats still sums exactly.
    """

    rows: int = 512
    inner: int = 1024
    columns: int = 1024


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
    x_scales, w_scales = broadcast_scales(x, w)
    (rows, inner), columns, blocks = x.values.shape, w.values.shape[1], x_scales.shape[1]
    tiles = tiles_of(rows, inner, columns, blocks, largest)
    wide = jnp.int32 if x.values.dtype == jnp.int8 and blocks == 1 else jnp.float32
    call = pl.pallas_call(
        partial(_kernel, block=min(inner // blocks, tiles.inner), blocks=blocks),
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=(-(-rows // tiles.rows), columns // tiles.columns, inner // tiles.inner),
        in_specs=[
            pl.BlockSpec((tiles.rows, tiles.inner), lambda i, j, k: (i, k)),
            pl.BlockSpec((tiles.inner, tiles.columns), lambda i, j, k: (k, j)),
            pl.BlockSpec((tiles.rows, blocks), lambda i, j, k: (i, 0)),
            pl.BlockSpec((blocks, tiles.columns), lambda i, j, k: (0, j)),
        ],
        out_specs=pl.BlockSpec((tiles.rows, tiles.columns), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.columns), wide)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * columns,
            bytes_accessed=bytes_moved(rows, inner, columns, blocks, jnp.dtype(dtype).itemsize, tiles),
            transcendentals=0,
        ),
        interpret=interpret,
        name="quantized_matmul",
    )
    return call(x.values, w.values, x_scales, w_scales)


def tiles_of(rows: int, inner: int, columns: int, blocks: int, largest: Tiles = Tiles()) -> Tiles:
    """The tiles for a product: a tile holds whole blocks, or a block whole tiles."""
    block = inner // blocks
    whole = block <= largest.inner
    return Tiles(
        min(largest.rows, -(-rows // SUBLANES) * SUBLANES),
        _divisor(inner, block, largest.inner) if whole else _divisor(block, LANES, largest.inner),
        _divisor(columns, LANES, largest.columns),
    )


def bytes_moved(rows: int, inner: int, columns: int, blocks: int, itemsize: int, tiles: Tiles) -> int:
    """Bytes of HBM: x once for each tile of columns, w once for each tile of rows, the scales, and the result."""
    across, down = columns // tiles.columns, -(-rows // tiles.rows)
    scales = 4 * blocks * (rows + columns * down)
    return rows * inner * across + inner * columns * down + scales + rows * columns * itemsize


def _divisor(size: int, step: int, most: int) -> int:
    """The largest multiple of `step`, up to `most`, that divides `size`."""
    return max(tile for tile in range(step, min(size, most) + 1, step) if size % tile == 0)


def _kernel(x, w, x_scales, w_scales, out, total, *, block: int, blocks: int):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    if blocks == 1:
        total[...] += _dot(x[...], w[...], total.dtype)
    else:
        _add_blocks(step, x, w, x_scales, w_scales, total, block, blocks)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        scale = x_scales[...] * w_scales[...] if blocks == 1 else 1
        out[...] = (total[...].astype(jnp.float32) * scale).astype(out.dtype)


def _add_blocks(step, x, w, x_scales, w_scales, total, size: int, blocks: int):
    """Adds the tile's blocks one by one, each at its scales."""
    count = x.shape[1] // size
    steps = pl.num_programs(2)
    for i in range(count):
        at = step * blocks // steps + i  # a tile holds whole blocks, or a block whole tiles
        part = _dot(x[:, i * size : (i + 1) * size], w[i * size : (i + 1) * size, :], jnp.float32)
        total[...] += part * _column(x_scales[...], at) * w_scales[pl.ds(at, 1), :]


def _dot(left: Array, right: Array, dtype: Any) -> Array:
    wide = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    product = lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=wide)
    return product.astype(dtype)


def _column(x: Array, at: Array) -> Array:
    """Column `at` of `x`, which no vector register can be asked for at run time: the sum of it and of zeros."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.sum(jnp.where(lane == at, x, 0), axis=1, keepdims=True)
