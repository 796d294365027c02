"""Arrays of a block of threads of the Hopper kernel in global and in shared memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.gpu_stream import Feed
from axon.kernels.paged_attention.gpu_work import Shape
from axon.kernels.warpgroups import CONSUMERS, ROWS, free_barriers, full_barriers, meeting_point
from axon.kernels.wgmma import shared


class Operands(NamedTuple):
    """In global memory.

    Attributes:
        q: `blocks kv_heads rows head_dim`, of which rows past the block's are not there where consumers alternate.
        cache: of pages. page_table: `sequences columns`.
        table, positions: of `gpu_work.table` and `gpu_work.row_positions`.
        tops: `2 kv_heads rows`, the score in base 2 with which the first part of a row begins, its sink, and with which
            any other does; None without sinks. slopes: `kv_heads rows`, ALiBi's; None without them.
    """

    q: Any
    cache: Cache
    page_table: Any
    table: Any
    positions: Any
    tops: Any
    slopes: Any


class Found(NamedTuple):
    """Of each consumer, in float32, what the first is to merge; or a part's output, and its log-sum-exp as `top`."""

    sums: Any
    top: Any
    total: Any


class Buffers(NamedTuple):
    """Shared memory, and the barriers on which the warpgroups meet.

    Attributes:
        q_or_out: of 64 rows each. rings_or_found: tiles of keys and of values, or when all are met `Found`.
        scales, wide: of a quantised cache, the scales of the tiles in the rings, of keys and of values; and of each
            consumer room for a tile as it is multiplied. None for a plain one.
        turn: of consumers that have different rows; None where they alternate. done: when all tiles are met.
    """

    q_or_out: Any
    rings_or_found: Any
    scales: Any
    wide: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any
    done: Any


def buffers(shape: Shape, operands: Operands) -> Buffers:
    """For the operands of a call."""
    tile, stages, parts = shape.tile, shape.stages, shape.rows // ROWS
    width, dtype, scaled = operands.q.shape[3], operands.q.dtype, operands.cache.key_scales is not None
    of_rows = plgpu.SMEM((CONSUMERS, ROWS), jnp.float32)
    found = Found(shared(CONSUMERS, ROWS, width, dtype=jnp.float32), of_rows, of_rows)
    ring = shared(stages, tile, width, dtype=operands.cache.keys.dtype)
    scales = plgpu.SMEM((stages, tile), jnp.float32)
    full = full_barriers(shape.chunks * (2 if scaled else 1), stages)
    free = free_barriers(stages, 1 if shape.alternating else CONSUMERS)
    return Buffers(
        q_or_out=shared(parts, ROWS, width, dtype=dtype),
        rings_or_found=plgpu.RefUnion((ring, ring), found),
        scales=(scales, scales) if scaled else None,
        wide=shared(CONSUMERS, tile, width, dtype=dtype) if scaled else None,
        q_full=full_barriers(1, parts),
        k_full=full,
        v_full=full,
        k_free=free,
        v_free=free,
        turn=None if shape.alternating else meeting_point(),
        done=meeting_point(),
    )


def feeds(cache: Cache, x: Buffers) -> list[Feed]:
    """Of keys, and of values."""
    (keys, values), _ = x.rings_or_found
    if x.scales is None:
        return [Feed([cache.keys], [keys], x.k_full, x.k_free), Feed([cache.values], [values], x.v_full, x.v_free)]
    return [
        Feed([cache.keys, cache.key_scales], [keys, x.scales[0]], x.k_full, x.k_free),
        Feed([cache.values, cache.value_scales], [values, x.scales[1]], x.v_full, x.v_free),
    ]
