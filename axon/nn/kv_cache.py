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
"""`key` and `value`, each `batch pages kv_heads page_size head_dim`; or, of latent attention, `latent`, `batch pages
page_size key_latent`. Of a decoder that attends to what an encoder read also `cross_key` and `cross_value`, each `batch
kv_seq heads head_dim`, which are made once."""

PAGE = 64
"""Tokens a page."""

PAGES = "batch pages kv_heads page_size head_dim.whole"
LATENT_PAGES = "batch pages page_size key_latent.whole"
QUERIES = "batch seq heads head_dim"


def kv_cache_specs(batch: int, length: int, kv_heads: int, head_dim: int) -> dict[str, ArraySpec]:
    """Room for `length` tokens of each sequence, in the compute dtype."""
    scope = axes.current()
    shape = (batch, 1 + -(-length // PAGE), kv_heads, PAGE, head_dim)
    spec = ArraySpec(parse_names(PAGES), shape, jnp.float32 if scope is None else scope.compute)
    return {"key": spec, "value": spec}


def positions_of(cache: KVCache) -> int:
    """For how many tokens of a sequence a cache of keys and values has room, of one layer or of several."""
    return (cache["key"].shape[-4] - 1) * PAGE


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    cache: KVCache,
    start: Array,
    sinks: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, KVCache]:
    """Attention of new tokens over all of their sequences' so far, and the cache with theirs in it.

    Args:
        q: `batch seq heads head_dim`; k, v: `batch seq kv_heads head_dim`, of the tokens from `start` on.
        config: its mask is causal, and perhaps has a window; a sequence is one document.
        sinks: `batch seq heads`, all alike along `batch` and `seq`, whatever the sizes of these.
        bias: by distance, likewise, with a last axis `_distances`, for as many keys as `positions_of(cache)`.

    Returns: `batch seq heads head_dim`, and the cache. Raises `UserError` for another mask.
    """
    scope = axes.current()

    def local(q, k, v, keys, values, start, *of_heads):
        return _over_pages(config, q, k, v, keys, values, start, *(None if x is None else x[0, 0] for x in of_heads))

    operands = (q, k, v, cache["key"], cache["value"], start, sinks, bias)
    if scope is None:
        out, keys, values = local(*operands)
        return out, {"key": keys, "value": values}
    queries = scope.placement.spec(parse_names(QUERIES))
    pages_spec = scope.placement.spec(parse_names(PAGES))
    # Whole sequences; and where kv_heads are split less than heads, all heads of those that are here.
    tokens = PartitionSpec(queries[0], None, pages_spec[2], None)
    of_sinks = None if sinks is None else PartitionSpec(*tokens[:3])
    of_bias = None if bias is None else tokens
    specs = (tokens, tokens, tokens, pages_spec, pages_spec, PartitionSpec(), of_sinks, of_bias)
    run = axes.per_device(local, specs, (tokens, pages_spec, pages_spec))
    out, keys, values = run(*jax.tree.map(axes.reshard, operands, specs))
    return axes.reshard(out, queries), {"key": keys, "value": values}


def latent_cache_specs(batch: int, length: int, width: int) -> dict[str, ArraySpec]:
    """Room for `length` latents of each sequence, of `width` numbers, in the compute dtype."""
    scope = axes.current()
    shape = (batch, 1 + -(-length // PAGE), PAGE, width)
    return {"latent": ArraySpec(parse_names(LATENT_PAGES), shape, jnp.float32 if scope is None else scope.compute)}


def cached_latent_attention(
    q: Array, k: Array, config: AttentionConfig, cache: KVCache, start: Array
) -> tuple[Array, KVCache]:
    """Attention of new tokens over the latents of all of their sequences' so far, each the key and the value of every
    head, and the cache with theirs in it.

    Args: as of `cached_attention`, but `q[batch seq heads key_latent]` and `k[batch seq key_latent]`.

    Returns: `batch seq heads key_latent`, and the cache.
    """

    def local(q, k, latents, start):
        k, pages = k[:, :, None], latents[:, :, None]
        out, pages, _ = _over_pages(config, q, k, k, pages, pages, start)
        return out, pages[:, :, 0]

    operands, scope = (q, k, cache["latent"], start), axes.current()
    if scope is None:
        out, latents = local(*operands)
        return out, {"latent": latents}
    queries = scope.placement.spec(parse_names(QUERIES))
    pages = scope.placement.spec(parse_names(LATENT_PAGES))
    tokens = PartitionSpec(queries[0], None, queries[2], None)  # whole sequences
    specs = (tokens, PartitionSpec(queries[0], None, None), pages, PartitionSpec())
    out, latents = axes.per_device(local, specs, (tokens, pages))(*jax.tree.map(axes.reshard, operands, specs))
    return axes.reshard(out, PartitionSpec(*queries[:3], None)), {"latent": latents}


def _over_pages(
    config: AttentionConfig,
    q: Array,
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    start: Array,
    sinks: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """A device's own part: the result, and the pages of keys and of values. `sinks`: `heads`; `bias`: `heads
    distances`."""
    (sequences, seq), pages = q.shape[:2], keys.shape[1]
    paged = Cache(keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:]))
    table = jnp.arange(sequences, dtype=jnp.int32)[:, None] * pages + jnp.arange(1, pages, dtype=jnp.int32)
    lens, bounds = jnp.full(sequences, start + seq, jnp.int32), seq * jnp.arange(sequences + 1, dtype=jnp.int32)
    new_q, new_k, new_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    options = {"window": causal_window(config.mask), "scale": config.scale, "soft_cap": config.soft_cap}
    of_heads = {"sinks": sinks, "distance_bias": bias}
    out, paged = paged_attention(new_q, new_k, new_v, paged, lens, table, bounds, **of_heads, **options)
    return out.reshape(q.shape), paged.keys.reshape(keys.shape), paged.values.reshape(values.shape)
