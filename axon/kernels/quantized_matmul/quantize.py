"""Arrays in 8 bits with scales: one for all, one a row or column, or one a block of both.

Blocks are those of DeepSeek-V3 (arXiv:2412.19437, section 3.3): 1 × 128 of activations, 128 × 128 of weights.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.errors import UserError
from axon.kernels.dtypes import EIGHT_BITS

MOST_PRODUCTS = 2**17
"""Of int8 values, -127 … 127, whose sum is less than 2³¹."""


class Granularity(NamedTuple):
    """How many rows and how many columns share a scale; None is all of them."""

    rows: int | None
    columns: int | None


TENSOR = Granularity(None, None)
ROW = Granularity(1, None)
COLUMN = Granularity(None, 1)
ROW_BLOCK = Granularity(1, 128)
BLOCK = Granularity(128, 128)


class Quantized(NamedTuple):
    """An array as `values · scales`, of equal rank, each scale being that of an even block of values."""

    values: Array  # in 8 bits; here matrices, `rows columns`
    scales: Array  # float32; here `row_blocks column_blocks`


class KMajor(NamedTuple):
    """The right operand of a product with k contiguous in memory, as the 8-bit tensor cores of Hopper GPUs read it."""

    values: Array  # out k: int8 or float8_e4m3fn
    scales: Array  # out_blocks k_blocks: float32

    @property
    def transposed(self) -> Quantized:
        """`k out`: a view where XLA multiplies by it, a copy where a kernel reads it."""
        return Quantized(self.values.T, self.scales.T)


def k_major(w: Quantized) -> KMajor:
    """`k out` as `out k`: a copy, to be made once, where weights are loaded."""
    return KMajor(w.values.T, w.scales.T)


def quantize(x: Array, dtype: Any, granularity: Granularity) -> Quantized:
    """`rows columns` in 8 bits, the largest of each block at the largest number of `dtype`; rounded to nearest even.

    Args:
        dtype: int8, of which -127 … 127 are used, or float8_e4m3fn, up to ±448.
        granularity: `TENSOR`, `ROW`, `COLUMN`, `ROW_BLOCK`, `BLOCK` or another; its blocks divide the matrix.

    Raises `UserError` for another dtype, or for blocks that do not divide the matrix.
    """
    if dtype not in EIGHT_BITS:
        raise UserError(f"quantize: to int8 or float8_e4m3fn, not {jnp.dtype(dtype)}")
    blocks = _blocks(x, granularity)  # row_blocks rows column_blocks columns
    scales = scale_of(jnp.max(jnp.abs(blocks), axis=(1, 3)), dtype)
    return Quantized(rounded(blocks / scales[:, None, :, None], dtype).reshape(x.shape), scales)


def scale_of(largest: Array, dtype: Any) -> Array:
    """The scale of values in `dtype` whose largest magnitude is `largest`; above 0, of zeros too."""
    return jnp.maximum(largest / _largest(dtype), jnp.finfo(jnp.float32).tiny)


def rounded(scaled: Array, dtype: Any) -> Array:
    """Values over their scale, in `dtype`: to nearest even, and limited to what it has."""
    limited = jnp.clip(scaled, -_largest(dtype), _largest(dtype))
    return (jnp.round(limited) if dtype == jnp.int8 else limited).astype(dtype)


def dequantize(x: Quantized) -> Array:
    """The array in float32."""
    return x.values.astype(jnp.float32) * spread(x.scales, *x.values.shape)


def spread(scales: Array, *sizes: int) -> Array:
    """The scales with these sizes in place of their own numbers of blocks, which divide them."""
    for axis, size in enumerate(sizes):
        scales = jnp.repeat(scales, size // scales.shape[axis], axis=axis)
    return scales


def _largest(dtype: Any) -> float:
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def _blocks(x: Array, granularity: Granularity) -> Array:
    """`row_blocks rows column_blocks columns`, float32."""
    (rows, columns), (tall, wide) = x.shape, granularity
    tall, wide = rows if tall is None else tall, columns if wide is None else wide
    if rows % tall or columns % wide:
        raise UserError(f"quantize: blocks of {tall} × {wide} do not divide a matrix of {rows} × {columns}")
    return x.astype(jnp.float32).reshape(rows // tall, tall, columns // wide, wide)


def broadcast_scales(x: Quantized, w: Quantized) -> tuple[Array, Array]:
    """`rows blocks` and `blocks out`, for the blocks that scales cut the contracted dimension into; 1 if none does."""
    blocks = max(x.scales.shape[1], w.scales.shape[0])
    return spread(x.scales, x.values.shape[0], blocks), spread(w.scales, blocks, w.values.shape[1])
