"""The keys and values of a model's sequences while it generates, in pages.

Each sequence has pages of its own, the first of them padding's (`axon.kernels.paged_attention`), so sequences and heads
split over devices as they do without a cache.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import ArraySpec
from axon.axes.patterns import parse_names
from axon.axes.specs import entries, num_shards
from axon.kernels.attention import AttentionConfig, causal_window
from axon.kernels.paged_attention import Cache, Tables, paged_attention, paged_attention_tables

KVCache = dict[str, Array]
"""`key` and `value`, each `batch pages kv_heads page_size head_dim`; or, of latent attention, `latent`, `batch pages
page_size key_latent`. Of a decoder that attends to what an encoder read also `cross_key` and `cross_value`, each `batch
kv_seq heads head_dim`, which are made once."""

PAGE = 128
"""Tokens a page: on a TPU a row of lanes, along which the tokens of narrow heads and the scales of all lie."""

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


@dataclass(frozen=True)
class PagedSizes:
    """What a step's tables depend on, of one device: its sequences, their new tokens, the heads of queries and of a
    `cache`, which is `pages kv_heads page_size head_dim` and its dtype, and whether a bias is added to the scores."""

    sequences: int
    seq: int
    heads: int
    cache: tuple[tuple[int, ...], Any]
    biased: bool


@partial(jax.tree_util.register_dataclass, data_fields=["lens", "table", "bounds", "tables"], meta_fields=["sizes"])
@dataclass(frozen=True)
class PagedStep:
    """Where a step's new tokens go and what they see, the same on every device and in every layer with these sizes: see
    `axon.kernels.paged_attention`."""

    sizes: PagedSizes
    lens: Array
    table: Array
    bounds: Array
    tables: Tables | None


def paged_sizes(cache: KVCache, tokens: tuple[int, ...], heads: int, biased: bool = False) -> PagedSizes:
    """Of `tokens`, batch and seq, and a cache of one layer or of several."""
    latent = "latent" in cache
    pages = cache["latent" if latent else "key"]
    spec = _token_spec(latent)
    batch_shards, head_shards = (num_shards(entries(spec[i])) for i in (0, 2))
    sequences, count = tokens[0] // batch_shards, pages.shape[-3 if latent else -4]
    kv_heads = 1 if latent else pages.shape[-3] // head_shards
    shape = (sequences * count, kv_heads, *pages.shape[-2:])
    return PagedSizes(sequences, tokens[1], heads // head_shards, (shape, pages.dtype), biased)


def paged_step(sizes: PagedSizes, start: Array) -> PagedStep:
    """Of new tokens from `start` on."""
    sequences, seq, (shape, dtype) = sizes.sequences, sizes.seq, sizes.cache
    pages = shape[0] // sequences
    table = jnp.arange(sequences, dtype=jnp.int32)[:, None] * pages + jnp.arange(1, pages, dtype=jnp.int32)
    lens, bounds = jnp.full(sequences, start + seq, jnp.int32), seq * jnp.arange(sequences + 1, dtype=jnp.int32)
    shapes = ((sequences * seq, sizes.heads, shape[3]), shape)
    q, keys = (cast(Array, jax.ShapeDtypeStruct(one, dtype)) for one in shapes)  # only these count
    tables = paged_attention_tables(q, Cache(keys, keys), lens, table, bounds, biased=sizes.biased)
    return PagedStep(sizes, lens, table, bounds, tables)


def cached_attention(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    cache: KVCache,
    step: PagedStep,
    sinks: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, KVCache]:
    """Attention of new tokens over all of their sequences' so far, and the cache with theirs in it.

    Args:
        q: `batch seq heads head_dim`; k, v: `batch seq kv_heads head_dim`, of the new tokens.
        config: its mask is causal, and perhaps has a window; a sequence is one document.
        step: of `paged_sizes(cache, …)`.
        sinks: `batch seq heads`, all alike along `batch` and `seq`, whatever the sizes of these.
        bias: by distance, likewise, with a last axis `_distances`, for as many keys as `positions_of(cache)`.

    Returns: `batch seq heads head_dim`, and the cache. Raises `UserError` for another mask.
    """

    def local(step, q, k, v, keys, values, *of_heads):
        return _over_pages(config, step, q, k, v, keys, values, *(None if x is None else x[0, 0] for x in of_heads))

    scope, operands = axes.current(), (q, k, v, cache["key"], cache["value"], sinks, bias)
    if scope is None:
        out, keys, values = local(step, *operands)
        return out, {"key": keys, "value": values}
    pages_spec, tokens = scope.placement.spec(parse_names(PAGES)), _token_spec(latent=False)
    of_sinks = None if sinks is None else PartitionSpec(*tokens[:3])
    of_bias = None if bias is None else tokens
    specs = (tokens, tokens, tokens, pages_spec, pages_spec, of_sinks, of_bias)
    run = axes.per_device(local, (_everywhere(step), *specs), (tokens, pages_spec, pages_spec))
    out, keys, values = run(step, *jax.tree.map(axes.reshard, operands, specs))
    return axes.reshard(out, scope.placement.spec(parse_names(QUERIES))), {"key": keys, "value": values}


def latent_cache_specs(batch: int, length: int, width: int) -> dict[str, ArraySpec]:
    """Room for `length` latents of each sequence, of `width` numbers, in the compute dtype."""
    scope = axes.current()
    shape = (batch, 1 + -(-length // PAGE), PAGE, width)
    return {"latent": ArraySpec(parse_names(LATENT_PAGES), shape, jnp.float32 if scope is None else scope.compute)}


def cached_latent_attention(
    q: Array, k: Array, config: AttentionConfig, cache: KVCache, step: PagedStep
) -> tuple[Array, KVCache]:
    """Attention of new tokens over the latents of all of their sequences' so far, each the key and the value of every
    head, and the cache with theirs in it.

    Args: as of `cached_attention`, but `q[batch seq heads key_latent]` and `k[batch seq key_latent]`.

    Returns: `batch seq heads key_latent`, and the cache.
    """

    def local(step, q, k, latents):
        k, pages = k[:, :, None], latents[:, :, None]
        out, pages, _ = _over_pages(config, step, q, k, k, pages, pages)
        return out, pages[:, :, 0]

    operands, scope = (q, k, cache["latent"]), axes.current()
    if scope is None:
        out, latents = local(step, *operands)
        return out, {"latent": latents}
    pages, tokens = scope.placement.spec(parse_names(LATENT_PAGES)), _token_spec(latent=True)
    specs = (tokens, PartitionSpec(tokens[0], None, None), pages)
    run = axes.per_device(local, (_everywhere(step), *specs), (tokens, pages))
    out, latents = run(step, *jax.tree.map(axes.reshard, operands, specs))
    queries = scope.placement.spec(parse_names(QUERIES))
    return axes.reshard(out, PartitionSpec(*queries[:3], None)), {"latent": latents}


def _token_spec(latent: bool) -> PartitionSpec:
    """Of queries, `batch seq heads head_dim`, over pages: whole sequences; and where kv_heads are split less than
    heads, all heads of those that are here. A latent is every head's."""
    scope = axes.current()
    if scope is None:
        return PartitionSpec(None, None, None, None)
    queries, pages = (scope.placement.spec(parse_names(names)) for names in (QUERIES, PAGES))
    return PartitionSpec(queries[0], None, queries[2] if latent else pages[2], None)


def _everywhere(step: PagedStep) -> PagedStep:
    """The specs of a step's arrays."""
    return jax.tree.map(lambda _: PartitionSpec(), step)


def _over_pages(
    config: AttentionConfig,
    step: PagedStep,
    q: Array,
    k: Array,
    v: Array,
    keys: Array,
    values: Array,
    sinks: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, Array, Array]:
    """A device's own part: the result, and the pages of keys and of values. `sinks`: `heads`; `bias`: `heads
    distances`."""
    paged = Cache(keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:]))
    new_q, new_k, new_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    options = {"window": causal_window(config.mask), "scale": config.scale, "soft_cap": config.soft_cap}
    given = {"sinks": sinks, "distance_bias": bias, "tables": step.tables}
    ragged = (step.lens, step.table, step.bounds)
    out, paged = paged_attention(new_q, new_k, new_v, paged, *ragged, **given, **options)
    return out.reshape(q.shape), paged.keys.reshape(keys.shape), paged.values.reshape(values.shape)
