"""How the Hopper kernels cut queries and keys into tiles, and which tiles meet."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.kernels.attention.mask import Mask


class Operands(NamedTuple):
    """Padded to whole tiles: `q[batch seq heads head_dim]`, `k, v[batch kv_seq kv_heads head_dim]`, and documents.

    The same of the references that a kernel gets. `documents` is None for a mask without them, or of queries
    `batch seq` and of keys `batch kv_seq`.
    """

    q: Any
    k: Any
    v: Any
    documents: Any


class Meeting(NamedTuple):
    """Which tiles of queries and of keys meet, booleans of `batch query_tiles key_tiles`; batch 1 without documents.

    Attributes:
        some: where some pair may be seen. all: where every pair is.
    """

    some: Array
    all: Array


def meeting(mask: Mask, queries: int, keys: int, real_keys: int, operands: Operands, start: Array | int) -> Meeting:
    """For tiles of so many queries and keys; keys from `real_keys` on are padding."""
    first = jnp.asarray(start, jnp.int32) + jnp.arange(operands.q.shape[1] // queries)[:, None] * queries
    key = jnp.arange(operands.k.shape[1] // keys) * keys
    low, high = mask.keys(first, first + queries, real_keys)
    some = (low < high) & (low < key + keys) & (key < high)
    whole = mask.sees_all(first, first + queries, key, key + keys) & (key + keys <= real_keys)
    some, whole = (jnp.broadcast_to(x, (1, first.shape[0], key.shape[0])) for x in (some, whole))
    if operands.documents is None:
        return Meeting(some, whole)
    least, most = (x[:, :, None] for x in _ends(operands.documents[0], queries))
    key_least, key_most = (x[:, None] for x in _ends(operands.documents[1], keys))
    one = (least == most) & (key_least == key_most) & (least == key_least)
    return Meeting(some & (least <= key_most) & (key_least <= most), whole & one)


def _ends(documents: Array, size: int) -> tuple[Array, Array]:
    """The least and the greatest document of each tile, `batch tiles`."""
    cut = documents.reshape(documents.shape[0], -1, size)
    return jnp.min(cut, axis=2), jnp.max(cut, axis=2)


def table(met: Meeting, start: Array | int) -> Array:
    """What a kernel reads of a tile of queries, `batch query_tiles 5`, in global memory: the loop over tiles of keys.

    The half-open range of tiles to visit, the range among them that needs no mask, and the index of the first query.
    Of a tile of keys: the same of `met` with its tiles exchanged.
    """
    first, stop = _run(met.some)
    stop = met.some.shape[2] - jnp.argmax(jnp.flip(met.some, 2), axis=2).astype(jnp.int32)
    stop = jnp.where(jnp.any(met.some, axis=2), stop, first)
    return jnp.stack([first, stop, *_run(met.all), jnp.broadcast_to(jnp.int32(start), first.shape)], axis=2)


def _run(found: Array) -> tuple[Array, Array]:
    """The first unbroken half-open range that is found, along the last axis; (0, 0) for none."""
    first = jnp.argmax(found, axis=2).astype(jnp.int32)
    after = ~found & (jnp.arange(found.shape[2]) > first[:, :, None])
    stop = jnp.where(jnp.any(after, axis=2), jnp.argmax(after, axis=2), found.shape[2]).astype(jnp.int32)
    return first, jnp.where(jnp.any(found, axis=2), stop, first)
