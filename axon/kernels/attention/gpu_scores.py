"""What the Hopper kernels do with a tile: its products on the tensor cores, and which of its pairs are seen.

The interpreter has no `wgmma` with an operand in registers, and no `run_state`: there `multiply_into` is plain.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.attention.gpu_tiles import Operands
from axon.kernels.attention.mask import Mask

LOG2E = math.log2(math.e)

LEAST = -1e30
"""Where the running maximum begins: finite, so that a row that has seen nothing has weights of zero."""

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
"""A number for each row of a tile."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
"""A number for each column of a tile."""


def shared(*shape: int, dtype: Any) -> Any:
    """Shared memory of matrices that TMA writes and `wgmma` reads: swizzled by 128 bytes, in tiles of 8 rows."""
    gpu: Any = plgpu  # whose transforms' types are abstract, and do work
    width = 128 // jnp.dtype(dtype).itemsize
    return gpu.SMEM(shape, dtype, transforms=(gpu.TilingTransform((8, width)), gpu.SwizzleTransform(128)))


def zeros(*shape: int) -> Array:
    """In registers, as a `wgmma` accumulates."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE)


def filled(size: int, value: float) -> Array:
    """A number for each row."""
    return plgpu.layout_cast(jnp.full((size,), value, jnp.float32), ROW)


def multiply(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """a·bᵀ of `a[rows width]` and `b[columns width]` in shared memory; `meanwhile` runs while the tensor cores do."""

    def issue(sums):
        plgpu.wgmma(sums, a, b.transpose((1, 0)))
        meanwhile()
        return sums[...]

    return pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32))


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


class Axis(NamedTuple):
    """One side of a tile: the index of its first element, how many there are, and the reference to their documents."""

    first: Array
    size: int
    documents: Any


def documents_of(operands: Operands, side: int, sequence: Array, first: Array, size: int) -> Any:
    """The reference to the documents of so many queries, side 0, or keys, side 1; None without documents."""
    return None if operands.documents is None else operands.documents[side].at[sequence, pl.ds(first, size)]


def masked(
    partly: Array, scores: Array, mask: Mask, real_keys: int, queries: Axis, keys: Axis, query_axis: int = 0
) -> Array:
    """−∞ where a pair is not seen, if `partly`. Queries are the rows of `scores`, or the columns: `query_axis`."""

    def mask_them(scores):
        return jnp.where(_seen(scores.shape, mask, real_keys, queries, keys, query_axis), scores, -jnp.inf)

    return lax.cond(partly, mask_them, lambda scores: scores, scores)


def _seen(shape: tuple[int, ...], mask: Mask, real_keys: int, queries: Axis, keys: Axis, query_axis: int) -> Array:
    layouts, spread = (ROW, COLUMN), (along_rows, along_columns)
    if query_axis == 1:
        layouts, spread = layouts[::-1], spread[::-1]

    def of_queries(x):
        return spread[0](x, keys.size)

    query = queries.first + plgpu.broadcasted_iota(jnp.int32, (queries.size,), 0, layout=layouts[0])
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1 - query_axis, layout=TILE)
    low, high = mask.low(query), mask.high(query)
    stop = real_keys if high is None else jnp.minimum(high, real_keys)
    seen = key < (stop - keys.first if high is None else of_queries(stop - keys.first))
    if low is not None:
        seen &= key >= of_queries(low - keys.first)
    if queries.documents is not None:
        own, theirs = (
            plgpu.load(x.documents, layout=layout, optimized=False)
            for x, layout in zip((queries, keys), layouts, strict=True)
        )
        seen &= of_queries(own) == spread[1](theirs, queries.size)
    return seen
