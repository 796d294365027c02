"""Grouped matmul in plain XLA: a loop over tiles of rows that begin where their group begins.

A tile's rows past its group's end are those of the next group, whose own tiles come later and write over them: so no
row is masked, gathered or padded, and the work is that of `rows + groups · tile` rows at most. (XLA's `ragged_dot`
multiplies every row by every group's weight on CPUs and GPUs, in a buffer of `groups · rows · embed`.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.axes import current, platform
from axon.kernels.grouped_matmul.differentiable import differentiable

CPU_TILE = 64
"""Rows a tile at most. For 2,048 float32 rows of 384 by 1,024 in 8 uneven groups, 2 cores took 90, 38, 52 and 72 ms
with 32, 64, 128 and 256, and `ragged_dot` 463 ms; equal groups took 33 ms, and 44 ms as one batched product."""

ACCELERATOR_TILE = 512
"""The same where each step of a loop costs a launch."""


def grouped_matmul_xla(x: Array, w: Array, sizes: Array) -> Array:
    """See `axon.kernels.grouped_matmul.grouped_matmul`."""
    return differentiable(product, weight_gradient)(x, w, sizes)


def product(x: Array, w: Array, sizes: Array, *, transposed: bool, first: Array | int = 0, dtype: Any = None) -> Array:
    """`rows inner` by `groups inner columns` → `rows columns`; the weight is `groups columns inner` if transposed.

    Args:
        first: the number of group 0's weight, where there are more than the groups have. dtype: of the result; None
            for that of `x`, to which the weight is converted as it is read.
    """

    def weight(group: Array) -> Array:
        own = w[first + group]
        return own.astype(x.dtype) if dtype is None else own

    return product_by_group(x, weight, sizes, w.shape[1 if transposed else 2], transposed=transposed, dtype=dtype)


def product_by_group(
    x: Array,
    weight: Callable[[Array], Array],
    sizes: Array,
    columns: int,
    *,
    transposed: bool,
    dtype: Any = None,
) -> Array:
    """The same, of weights of which `weight` makes a group's, by its number, where its rows are multiplied."""
    rows, groups = x.shape[0], sizes.shape[0]
    tile = _tile(rows, groups)
    spans, padded = _spans(sizes, rows), _padded(x, tile)
    counts = -(-(spans.stop - spans.start) // tile)
    most = -(-rows // tile) + groups
    group = jnp.repeat(jnp.arange(groups), counts, total_repeat_length=most)
    begin = spans.start[group] + (jnp.arange(most) - (jnp.cumsum(counts) - counts)[group]) * tile

    def step(i, out):
        contracted = (((1,), (1 if transposed else 0,)), ((), ()))
        part = _dot(lax.dynamic_slice_in_dim(padded, begin[i], tile), weight(group[i]), contracted)
        return lax.dynamic_update_slice_in_dim(out, part.astype(out.dtype), begin[i], 0)

    out = lax.fori_loop(0, jnp.sum(counts), step, jnp.zeros((rows + tile, columns), dtype or x.dtype))
    return jnp.where(jnp.arange(rows)[:, None] < spans.stop[-1], out[:rows], 0)


def weight_gradient(x: Array, dy: Array, sizes: Array, *, dtype: Any) -> Array:
    """`rows embed` and `rows out` → `groups embed out` in `dtype`, summed in float32 over a group's tiles."""
    rows = x.shape[0]
    tile = _tile(rows, sizes.shape[0])
    x, dy, span = _padded(x, tile), _padded(dy, tile), _spans(sizes, rows)

    def group(_, span):
        def step(i, total):
            first = span.start + i * tile
            own = first + jnp.arange(tile)[:, None] < span.stop
            left, right = (_rows_of(own, lax.dynamic_slice_in_dim(side, first, tile)) for side in (x, dy))
            return total + _dot(left, right, (((0,), (0,)), ((), ())))

        tiles = -(-(span.stop - span.start) // tile)
        zeros = jnp.zeros((x.shape[1], dy.shape[1]), jnp.float32)
        return None, lax.fori_loop(0, tiles, step, zeros).astype(dtype)

    return lax.scan(group, None, span)[1]


class _Spans(NamedTuple):
    start: Array  # groups: each one's first row
    stop: Array  # groups: the row after its last


def _spans(sizes: Array, rows: int) -> _Spans:
    stop = jnp.minimum(jnp.cumsum(sizes), rows)
    return _Spans(jnp.concatenate([jnp.zeros_like(stop[:1]), stop[:-1]]), stop)


def _rows_of(own: Array, rows: Array) -> Array:
    return jnp.where(own, rows, jnp.zeros((), rows.dtype))


def _dot(left: Array, right: Array, dimensions: Any) -> Array:
    wide = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(left, right, dimensions, preferred_element_type=wide).astype(jnp.float32)


def _padded(x: Array, tile: int) -> Array:
    """With a tile of zero rows after the last, so that no tile begins too late to be cut out where it begins."""
    return jnp.pad(x, ((0, tile), (0, 0)))


def _tile(rows: int, groups: int) -> int:
    """The power of two next above an even group's rows, and no more than the platform's; or as many as the scope says,
    so that the bits of a row do not depend on how many there are."""
    if (scope := current()) is not None and scope.row_block is not None:
        return scope.row_block
    even = -(-rows // groups)
    return min(1 << (even - 1).bit_length(), CPU_TILE if platform() == "cpu" else ACCELERATOR_TILE)
