"""Which pairs of a tile of scores are seen, in the registers of the Hopper kernels of attention."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.attention.gpu_tiles import Operands
from axon.kernels.attention.mask import Mask
from axon.kernels.wgmma import COLUMN, ROW, TILE, along_columns, along_rows

LOG2E = math.log2(math.e)

LEAST = -1e30
"""Where the running maximum begins: finite, so that a row that has seen nothing has weights of zero."""


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
