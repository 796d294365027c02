"""Attention as the formula says it, with the dense mask: what the fast paths are compared with."""

import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.attention.problem import Form, Given


def attention_reference(q: Array, k: Array, v: Array, form: Form, given: Given = Given()) -> tuple[Array, Array]:
    """See `axon.kernels.attention.attention_and_lse`. Scores and softmax are float32 at least."""
    batch, queries, heads, width = q.shape
    kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, width).astype(wide)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, k.astype(wide)) * form.scale
    if form.soft_cap is not None:
        scores = form.soft_cap * jnp.tanh(scores / form.soft_cap)
    ahead, seen = _pairs(form, given, queries, k.shape[1])
    if given.slopes is not None:
        scores += lax.stop_gradient(given.slopes).astype(wide).reshape(kv_heads, -1, 1, 1) * ahead
    scores = jnp.where(seen, scores, -jnp.inf)
    if given.sinks is not None:
        sink = given.sinks.astype(wide).reshape(kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    lse = _logsumexp(scores)
    weights = jnp.exp(scores - jnp.where(jnp.isinf(lse), 0, lse))[..., : k.shape[1]]
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights, v.astype(wide))
    lse = lse[..., 0].reshape(batch, heads, queries).swapaxes(1, 2)
    return out.reshape(batch, queries, heads, v.shape[-1]).astype(q.dtype), lse


def _pairs(form: Form, given: Given, queries: int, keys: int) -> tuple[Array, Array]:
    """How far each key is ahead of each query, `queries keys`, and whether it is seen, `batch 1 1 queries keys`."""
    query, key = given.start + jnp.arange(queries)[:, None], jnp.arange(keys)[None, :]
    documents = given.documents and (given.documents[0][:, :, None], given.documents[1][:, None, :])
    seen = jnp.ones((1, queries, keys), bool)
    allowed = form.mask.allowed(query, key, documents)
    seen = seen if allowed is None else seen & allowed
    return key - query, seen[:, None, None]


def _logsumexp(scores: Array) -> Array:
    """Over the last dimension, which stays; −∞ for a row of −∞, with gradients that are zero there."""
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.sum(jnp.exp(scores - top), axis=-1, keepdims=True)
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
