"""Attention as the formula says it, with the dense mask: what the fast paths are compared with."""

import jax.numpy as jnp
from jax import Array

from axon.kernels.attention.mask import Documents, Mask


def attention_reference(
    q: Array, k: Array, v: Array, mask: Mask, documents: Documents, start: Array | int, scale: float
) -> Array:
    """See `axon.kernels.attention.attention`. Scores and softmax are float32 at least."""
    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, width).astype(wide)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k.astype(wide)) * scale
    seen = jnp.ones((1, queries, keys), bool)
    pairs = None if documents is None else (documents[0][:, :, None], documents[1][:, None, :])
    allowed = mask.allowed(start + jnp.arange(queries)[:, None], jnp.arange(keys)[None, :], pairs)
    seen = seen if allowed is None else seen & allowed
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=jnp.finfo(wide).min)
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights, v.astype(wide))
    return out.reshape(batch, queries, heads, v.shape[-1]).astype(q.dtype)
