"""Which paged attentions the Hopper kernel supports, and in which tiles; known without importing Pallas."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.kernels import hopper
from axon.kernels.paged_attention.cache import Cache, quantised
from axon.kernels.paged_attention.ragged import AttentionInputs


class Sizes(NamedTuple):
    """Keys of a tile, and how many such tiles of keys and of values shared memory holds."""

    tile: int
    stages: int


class ModeSizes(NamedTuple):
    """Where two consumers have different rows of a block and the same tiles, and where they have every other tile.

    An even number of stages in the second: so a slot always is the same consumer's, and so is its barriers' phase.
    """

    apart: Sizes
    alternating: Sizes


SIZES: Mapping[tuple[int, bool], ModeSizes] = {
    (64, False): ModeSizes(Sizes(128, 4), Sizes(128, 4)),
    (128, False): ModeSizes(Sizes(128, 3), Sizes(64, 6)),
    (64, True): ModeSizes(Sizes(128, 4), Sizes(128, 8)),
    (128, True): ModeSizes(Sizes(64, 6), Sizes(64, 8)),
}
"""head_dim, and whether the cache is quantised → tiles with which nothing spills, as many as fit in shared memory."""

HEAD_DIMS = (64, 128)

PAGE_SIZES = (16, 32, 64, 128)
"""Which divide a tile, or are divided by one."""

LEAST_QUANTISED_PAGE = 32
"""Whose scales fill the 128 bytes to which TMA aligns what it writes."""

MOST_GROUP = 64
"""Heads that share a head of keys, at most: the rows of a tile."""


def unsupported(q: Array, cache: Cache, inputs: AttentionInputs, chip: str) -> str | None:
    """Why the kernel cannot run this on a chip; None if it can."""
    if (reason := hopper.unsupported(chip)) is not None:
        return reason
    if cache.head_dim not in HEAD_DIMS:
        return f"it supports head_dim {_either(HEAD_DIMS)}, not {cache.head_dim}"
    if cache.page_size not in PAGE_SIZES:
        return f"it supports pages of {_either(PAGE_SIZES)}, not {cache.page_size}"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it supports queries of bfloat16 and float16, not {q.dtype}"
    if (reason := _unsupported_cache(q, cache)) is not None:
        return reason
    if q.shape[1] // cache.kv_heads > MOST_GROUP:
        return f"it supports {MOST_GROUP} heads that share one of keys, not {q.shape[1] // cache.kv_heads}"
    if inputs.distance_bias is not None:
        return "it adds no bias by distance to the scores"
    return None


def _unsupported_cache(q: Array, cache: Cache) -> str | None:
    dtype = cache.keys.dtype
    if not quantised(dtype):
        return None if dtype == q.dtype else f"it supports a cache of the queries' {q.dtype}, not {dtype}"
    if q.dtype != jnp.bfloat16:
        return f"over a quantised cache it supports queries of bfloat16, not {q.dtype}"
    if cache.page_size < LEAST_QUANTISED_PAGE:
        return f"it supports quantised pages of {LEAST_QUANTISED_PAGE} or more, not {cache.page_size}"
    return None


def _either(known: Iterable[int]) -> str:
    *most, last = map(str, known)
    return f"{', '.join(most)} or {last}"
