"""The quantised product on Hopper GPUs: our own kernel in Pallas Mosaic GPU."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from axon.kernels.cost import Cost
from axon.kernels.hopper import multiprocessors
from axon.kernels.quantized_matmul.gpu_product import Operands, Product
from axon.kernels.quantized_matmul.gpu_support import PIECE, STEP
from axon.kernels.quantized_matmul.quantize import KMajor, Quantized, spread
from axon.kernels.warpgroups import CONSUMERS, ROWS

STAGES = {2: 4, 4: 3}
"""Bytes of an element of the result → steps in flight, as many as shared memory has room for beside it."""


def quantized_matmul_gpu(
    x: Quantized, w: KMajor, dtype: Any, *, blocks: int | None = None, interpret: Any = False
) -> Array:
    """See `axon.kernels.quantized_matmul.quantized_matmul`.

    Args:
        blocks: of threads, at most, which share the tiles; by default one for each multiprocessor.
    """
    (rows, inner), out = x.values.shape, w.values.shape[0]
    pieces = 2 if out % (2 * PIECE) == 0 else 1
    stages = STAGES[jnp.dtype(dtype).itemsize]
    kernel = Product(pieces, stages, dtype, cost(rows, inner, out, dtype), blocks or multiprocessors(), interpret)
    return kernel.run(_operands(_padded(x), w))[:rows]


def cost(rows: int, inner: int, out: int, dtype: Any) -> Cost:
    """With each operand read from HBM once: what a tile needs again is in the L2 cache."""
    return Cost(2 * rows * inner * out, rows * inner + inner * out + rows * out * jnp.dtype(dtype).itemsize)


def _operands(x: Quantized, w: KMajor) -> Operands:
    """Cut as the kernel takes them; scales are spread to rows and to columns or pieces of them."""
    (rows, inner), out, steps = x.values.shape, w.values.shape[0], x.values.shape[1] // STEP
    x_steps, w_steps = x.scales.shape[1] > 1, w.scales.shape[1] > 1
    return Operands(
        x.values.reshape(rows // ROWS, ROWS, inner),
        w.values.reshape(out // PIECE, PIECE, inner),
        spread(x.scales, rows, steps).T if x_steps else None,
        spread(w.scales, out // PIECE, steps) if w_steps else None,
        None if x_steps else spread(x.scales, rows, 1)[:, 0],
        None if w_steps else spread(w.scales, out, 1)[:, 0],
    )


def _padded(x: Quantized) -> Quantized:
    """Whole tiles of rows, each row with scales of its own."""
    rows = x.values.shape[0]
    widths = (0, -rows % (CONSUMERS * ROWS)), (0, 0)
    return Quantized(jnp.pad(x.values, widths), jnp.pad(spread(x.scales, rows, x.scales.shape[1]), widths))
