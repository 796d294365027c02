"""The keys and values of a model's sequences while it generates, in pages.

Each sequence has pages of its own, the first of them padding's (`axon.kernels.paged_attention`), so sequences and heads
split over devices as they do without a cache.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import ArraySpec
from axon.axes.patterns import parse_names
from axon.kernels.attention import AttentionConfig, causal_window
from axon.kernels.paged_attention import Cache, paged_attention

KVCache = dict[str, Array]
"""`key` and `value`, each `batch pages kv_heads page_size head_dim`."""

PAGE = 64
"""Tokens a page."""

PAGES = "batch pages kv_heads page_size head_dim.whole"
QUERIES = "batch seq heads head_dim"


def kv_cache_specs(batch: int, length: int, kv_heads: int, head_dim: int) -> dict[str, ArraySpec]:
    """Room for `length` tokens of each sequence, in the compute dtype."""
    scope = axes.current()
    shape = (batch, 1 + -(-length // PAGE), kv_heads, PAGE, head_dim)
    spec = ArraySpec(parse_names(PAGES), shape, jnp.float32 if scope is None else scope.compute)
    return {"key": spec, "value": spec}


def cached_attention(
    q: Array, k: Array, v: Array, config: AttentionConfig, cache: KVCache, start: Array, sinks: Array | None = None
) -> tuple[Array, KVCache]:
    """Attention of new tokens over all of their sequences' so far, and the cache with theirs in it.

    Args:
        q: `batch seq heads head_dim`; k, v: `batch seq kv_heads head_dim`, of the tokens from `start` on.
        config: its mask is causal, and perhaps has a window; a sequence is one document.
        sinks: `batch seq heads`, all alike along `batch` and `seq`, whatever the sizes of these.

    Returns: `batch seq heads head_dim`, and the cache. Raises `UserError` for another mask.
    """
    window, scope = causal_window(config.mask), axes.current()
    options = {"window": window, "scale": config.scale, "soft_cap": config.soft_cap}

    def local(q, k, v, keys, values, start, sinks):
        (sequences, seq), pages = q.shape[:2], keys.shape[1]
        paged = Cache(keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:]))
        table = jnp.arange(sequences, dtype=jnp.int32)[:, None] * pages + jnp.arange(1, pages, dtype=jnp.int32)
        lens, bounds = jnp.full(sequences, start + seq, jnp.int32), seq * jnp.arange(sequences + 1, dtype=jnp.int32)
        new_q, new_k, new_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        own = None if sinks is None else sinks[0, 0]
        out, paged = paged_attention(new_q, new_k, new_v, paged, lens, table, bounds, sinks=own, **options)
        return out.reshape(q.shape), paged.keys.reshape(keys.shape), paged.values.reshape(values.shape)

    operands = (q, k, v, cache["key"], cache["value"], start, sinks)
    if scope is None:
        out, *pages = local(*operands)
        return out, dict(zip(cache, pages, strict=True))
    queries = scope.placement.spec(parse_names(QUERIES))
    pages_spec = scope.placement.spec(parse_names(PAGES))
    # Whole sequences; and where kv_heads are split less than heads, all heads of those that are here.
    tokens = PartitionSpec(queries[0], None, pages_spec[2], None)
    of_sinks = None if sinks is None else PartitionSpec(*tokens[:3])
    specs = (tokens, tokens, tokens, pages_spec, pages_spec, PartitionSpec(), of_sinks)
    run = axes.per_device(local, specs, (tokens, pages_spec, pages_spec))
    out, *pages = run(*jax.tree.map(axes.reshard, operands, specs))
    return axes.reshard(out, queries), dict(zip(cache, pages, strict=True))
