"""Attention by its formula, with the dense mask: the reference for the fast paths."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.attention.problem import AttentionConfig, AttentionInputs


def attention_reference(
    q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs = AttentionInputs()
) -> tuple[Array, Array]:
    """See `axon.kernels.attention.attention_and_lse`. Scores and softmax are float32 at least."""
    (batch, queries, heads, _), kv_heads = q.shape, k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = _scores(q.astype(wide), k.astype(wide), config, inputs)
    if inputs.sinks is not None:
        sink = inputs.sinks.astype(wide).reshape(kv_heads, -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    lse = _logsumexp(scores)
    weights = jnp.exp(scores - jnp.where(jnp.isinf(lse), 0, lse))[..., : k.shape[1]]
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights, v.astype(wide))
    lse = lse[..., 0].reshape(batch, heads, queries).swapaxes(1, 2)
    return out.reshape(batch, queries, heads, v.shape[-1]).astype(q.dtype), lse


def attention_gradients_reference(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    rows: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """See `axon.kernels.attention.attention_gradients`."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    dout, lse, total = (
        _by_group(x.astype(wide), k.shape[2]) for x in (rows[0], rows[1][..., None], rows[2][..., None])
    )
    scores, backward = jax.vjp(lambda q, k: _scores(q, k, config, inputs), q.astype(wide), k.astype(wide))
    weights = jnp.exp(scores - jnp.where(jnp.isinf(lse), jnp.inf, lse))
    dscores = weights * (jnp.einsum("bkgqd,bskd->bkgqs", dout, v.astype(wide)) - total)
    return *backward(dscores), jnp.einsum("bkgqs,bkgqd->bskd", weights, dout)


def _scores(q: Array, k: Array, config: AttentionConfig, inputs: AttentionInputs) -> Array:
    """`batch kv_heads group seq kv_seq`; −∞ where not seen."""
    scores = jnp.einsum("bkgqd,bskd->bkgqs", _by_group(q, k.shape[2]), k) * config.scale
    if config.soft_cap is not None:
        scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    ahead, seen = _pairs(config, inputs, q.shape[1], k.shape[1])
    if inputs.alibi_slopes is not None:
        slopes = lax.stop_gradient(inputs.alibi_slopes).astype(q.dtype)
        scores += slopes.reshape(k.shape[2], -1, 1, 1) * ahead
    if inputs.distance_bias is not None:
        bias = inputs.distance_bias.astype(q.dtype)[:, k.shape[1] - 1 + ahead]
        scores += bias.reshape(k.shape[2], -1, *ahead.shape)
    return jnp.where(seen, scores, -jnp.inf)


def _by_group(x: Array, kv_heads: int) -> Array:
    """`batch seq heads head_dim` → `batch kv_heads group seq head_dim`."""
    batch, seq, heads, width = x.shape
    return x.reshape(batch, seq, kv_heads, heads // kv_heads, width).transpose(0, 2, 3, 1, 4)


def _pairs(config: AttentionConfig, inputs: AttentionInputs, queries: int, keys: int) -> tuple[Array, Array]:
    """How far each key is ahead of each query, `queries keys`, and whether it is seen, `batch 1 1 queries keys`."""
    query, key = inputs.start + jnp.arange(queries)[:, None], jnp.arange(keys)[None, :]
    documents = inputs.documents and (inputs.documents[0][:, :, None], inputs.documents[1][:, None, :])
    seen = jnp.ones((1, queries, keys), bool)
    allowed = config.mask.allowed(query, key, documents)
    seen = seen if allowed is None else seen & allowed
    return key - query, seen[:, None, None]


def _logsumexp(scores: Array) -> Array:
    """Over the last dimension, which stays; −∞ for a row of −∞, with gradients that are zero there."""
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.sum(jnp.exp(scores - top), axis=-1, keepdims=True)
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
