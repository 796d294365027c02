"""Paged attention by its formula: each query against all pages of its sequence, dense, under a mask."""

import jax.numpy as jnp
from jax import Array

from axon.kernels.paged_attention.cache import Cache, write
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs, places


def paged_attention_reference(
    q: Array, k: Array, v: Array, cache: Cache, inputs: AttentionInputs, config: AttentionConfig
) -> tuple[Array, Cache]:
    """See `axon.kernels.paged_attention.paged_attention`. Scores and softmax are float32 at least."""
    tokens, heads, head_dim = q.shape
    where = places(inputs, tokens)
    cache = write(cache, k, v, inputs, where)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    table = inputs.page_table[where.sequences]
    keys, values = (_gather(*part, table, wide) for part in _parts(cache))
    positions = jnp.arange(keys.shape[1])
    grouped = q.astype(wide).reshape(tokens, cache.kv_heads, -1, head_dim)
    scores = config.finish(jnp.einsum("tkgd,tskd->tkgs", grouped, keys))
    if inputs.distance_bias is not None:
        distances = len(positions) - 1 + positions - where.positions[:, None]
        bias = inputs.distance_bias.astype(wide)[:, distances].swapaxes(0, 1)
        scores += bias.reshape(tokens, cache.kv_heads, -1, len(positions))
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes.astype(wide).reshape(cache.kv_heads, -1, 1)
        scores += slopes * (positions - where.positions[:, None])[:, None, None]
    seen = (config.seen(where.positions[:, None], positions) & where.real[:, None])[:, None, None]
    top = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=jnp.finfo(wide).min)
    sinks = jnp.full(heads, -jnp.inf) if inputs.sinks is None else inputs.sinks
    sinks = sinks.astype(wide).reshape(cache.kv_heads, -1, 1)
    top = jnp.maximum(top, sinks)
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - top)
    weights = weights / jnp.maximum(total, jnp.finfo(wide).tiny)
    out = jnp.einsum("tkgs,tskd->tkgd", weights, values)
    return out.reshape(tokens, heads, head_dim).astype(q.dtype), cache


def _parts(cache: Cache):
    return (cache.keys, cache.key_scales), (cache.values, cache.value_scales)


def _gather(cached: Array, scales: Array | None, table: Array, wide) -> Array:
    """`tokens positions kv_heads head_dim`: the pages of each query's sequence, one after the other."""
    pages = cached[table].astype(wide)
    if scales is not None:
        pages = pages * scales[table][..., None]
    tokens, _, kv_heads, _, head_dim = pages.shape
    return pages.swapaxes(2, 3).reshape(tokens, -1, kv_heads, head_dim)
