"""Attention in plain XLA: blocks of queries, each against only the keys that its mask can reach.

Causal attention so does half the work of the dense formula, a window a fraction, and no `seq × seq` array exists.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.attention.mask import Documents, Mask

BLOCK = 64
"""Queries a block, at least: on a CPU the score block then stays in its cache."""

BLOCKS = 16
"""Blocks of queries, at most, so that long sequences do not make long programs."""


def attention_xla(q: Array, k: Array, v: Array, mask: Mask, documents: Documents, start: int, scale: float) -> Array:
    """See `axon.kernels.attention.attention`."""
    batch, queries, heads, width = q.shape
    kv_heads, groups = k.shape[2], heads // k.shape[2]
    block = max(BLOCK, -(-queries // BLOCKS))
    k, v = (lax.transpose(x, (0, 2, 1, 3)) for x in (k, v))
    q = lax.transpose(q.reshape(batch, queries, kv_heads, groups, width), (0, 2, 3, 1, 4))
    blocks = []
    for first in range(0, queries, block):
        last = min(first + block, queries)
        low, high = mask.keys(start + first, start + last, k.shape[2])
        low = min(low, k.shape[2] - 1)
        high = max(high, low + 1)  # one key at least, perhaps unseen
        part = q[:, :, :, first:last].reshape(batch, kv_heads, -1, width)
        pairs = documents and (documents[0][:, first:last, None], documents[1][:, None, low:high])
        seen = _seen(mask, start + first, start + last, low, high, pairs)
        # The scores are made again in the backward: kept, they would be the `seq × seq` array after all.
        made = jax.checkpoint(_block, static_argnums=(4,))(part, k[:, :, low:high], v[:, :, low:high], seen, scale)
        blocks.append(made.reshape(batch, kv_heads, groups, last - first, -1))
    out = jnp.concatenate(blocks, axis=3)
    return lax.transpose(out, (0, 3, 1, 2, 4)).reshape(batch, queries, heads, -1)


def _seen(mask: Mask, first: int, last: int, low: int, high: int, documents: Documents) -> Array | None:
    """Booleans `batch queries keys`, or None where the block needs no mask."""
    if mask.sees_all(first, last, low, high):
        return None
    return mask.allowed(jnp.arange(first, last)[:, None], jnp.arange(low, high)[None, :], documents)


def _block(q: Array, k: Array, v: Array, seen: Array | None, scale: float) -> Array:
    """`q[batch kv_heads groups·queries head_dim]` against `k, v[batch kv_heads keys head_dim]`."""
    scores = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32) * scale
    if seen is not None:
        seen = jnp.broadcast_to(seen, (q.shape[0], *seen.shape[-2:]))
        seen = jnp.tile(seen, (1, q.shape[2] // seen.shape[1], 1))[:, None]
        scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    if seen is not None:
        weights = jnp.where(seen, weights, 0)
    # Divided here, not after the product: its backward would need the product once more.
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(v.dtype)
    out = lax.dot_general(weights, v, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    return out.astype(q.dtype)
