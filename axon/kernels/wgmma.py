"""Tiles on a Hopper GPU's tensor cores (`wgmma`): as they lie in shared memory and in registers, and their products.

The interpreter has no `wgmma` with an operand in registers, and no `run_state`: there `multiply_into` is plain.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
"""A number for each row of a tile."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""A number for each column of a tile."""


def shared(*shape: int, dtype: Any) -> Any:
    """Shared memory of matrices that TMA writes and `wgmma` reads: in tiles of 8 rows, swizzled by up to 128 bytes."""
    gpu: Any = plgpu  # whose transforms' types are abstract, and do work
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * size)
    return gpu.SMEM(shape, dtype, transforms=(gpu.TilingTransform((8, swizzle // size)), gpu.SwizzleTransform(swizzle)))


def zeros(*shape: int, dtype: Any = jnp.float32) -> Array:
    """In registers, as a `wgmma` accumulates."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), TILE)


def filled(size: int, value: float) -> Array:
    """A number for each row."""
    return plgpu.layout_cast(jnp.full((size,), value, jnp.float32), ROW)


def multiply(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """a·bᵀ of `a[rows width]` and `b[columns width]` in shared memory, summed in float32, of int8 in int32.

    `meanwhile` runs while the tensor cores do.
    """

    def issue(sums):
        plgpu.wgmma(sums, a, b.transpose((1, 0)))
        meanwhile()
        return sums[...]

    return pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), sum_dtype(a.dtype)))


def sum_dtype(dtype: Any) -> Any:
    """In which a `wgmma` sums products of operands of `dtype`."""
    return jnp.int32 if dtype == jnp.int8 else jnp.float32


def multiply_into(sums: Array, a: Array, b: Any, interpret: Any) -> Array:
    """sums + a·b of `a[rows columns]` in registers and `b[columns width]` in shared memory."""
    if interpret:
        return sums + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    accumulator: Any = plgpu.WGMMAAccumulatorRef
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(accumulator.init(sums))


def opaque(index: Array) -> Array:
    """`index`, hidden from the compiler in the body of a loop.

    Else it would compute all addresses of what is the same in every step before the loop, and their registers spill.
    """
    return lax.optimization_barrier(index)


def along_rows(x: Array, columns: int) -> Array:
    """A number for each row, as a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (x.shape[0], columns), [0]), TILE)


def along_columns(x: Array, rows: int) -> Array:
    """A number for each column, as a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, x.shape[0]), [1]), TILE)
