"""The keys and values of a model's sequences while it generates, in pages.

Each row of `batch` has pages of its own, the first of each layer padding's (`axon.kernels.paged_attention`), so rows
and heads split over devices as they do without a cache. A row is one sequence, or the tokens of many, as `Ragged` says.
Every layer writes to its own pages of one array that all layers of a kind share: so it is updated in place.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes.patterns import parse_names
from axon.axes.specs import entries, num_shards
from axon.kernels.attention import AttentionConfig, causal_window
from axon.kernels.paged_attention import Cache, Tables, paged_attention, paged_attention_tables
from axon.nn.cache import CacheSpec

KVCache = dict[str, Array]
"""`key` and `value`, each `batch _layers pages kv_heads page_size head_dim`, and if they are quantised `key_scale` and
`value_scale`, `batch _layers pages kv_heads page_size`; or, of latent attention, `latent`, `batch _layers pages
page_size key_latent`."""

PAGE = 128
"""Tokens a page: on a TPU a row of lanes, along which the tokens of narrow heads and the scales of all lie."""

PAGES = "batch _layers pages kv_heads page_size head_dim.whole"
SCALES = "batch _layers pages kv_heads page_size"
LATENT_PAGES = "batch _layers pages page_size key_latent.whole"
QUERIES = "batch seq heads head_dim"


def kv_cache_specs(batch: int, length: int, kv_heads: int, head_dim: int) -> dict[str, CacheSpec]:
    """Room for `length` tokens of each sequence, in the compute dtype."""
    scope = axes.current()
    shape = (batch, 1, 1 + -(-length // PAGE), kv_heads, PAGE, head_dim)
    dtype = jnp.float32 if scope is None else scope.compute
    spec = CacheSpec(parse_names(PAGES), shape, dtype, cache_kind="pages")
    return {"key": spec, "value": spec}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lens", "bounds", "tables", "drafts", "versions"],
    meta_fields=["windows"],
)
@dataclass(frozen=True)
class Ragged:
    """Whose the tokens of a step are, where one row of `batch` has those of many sequences; and their pages.

    Args:
        lens, bounds: int32 `sequences`, their lengths with the new tokens, and `sequences + 1`, where the new tokens of
            each begin in the row: see `axon.kernels.paged_attention`.
        tables: of each of `windows` int32 `sequences pages_per_sequence`. windows: how many keys layers see, each
            with pages of their own, of which those before the window need not be there; None: all keys.
        drafts, versions: int32 `sequences`, of sequences with states: see `axon.nn.SequenceRows`.
    """

    lens: Array
    bounds: Array
    tables: tuple[Array, ...]
    windows: tuple[int | None, ...]
    drafts: Array | None = None
    versions: Array | None = None


def positions_of(cache: KVCache, start: Array | Ragged | None) -> int:
    """For how many tokens of a sequence a cache of keys and values has room; `start`: see `axon.nn.Inputs`."""
    pages, _, size, _ = cache["key"].shape[-4:]
    return size * (start.tables[0].shape[1] if isinstance(start, Ragged) else pages - 1)


@dataclass(frozen=True)
class PagedSizes:
    """What a step's tables depend on, of one device: its rows of `batch`, their new tokens, the heads of queries and of
    a `cache`, which is `pages kv_heads page_size head_dim`, of all rows and layers, and its dtype; the pages of a layer
    in a row, whether a bias is added to the scores, and how many keys are seen."""

    rows: int
    seq: int
    heads: int
    cache: tuple[tuple[int, ...], Any]
    pages: int
    biased: bool
    window: int | None


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

    def in_layer(self, place: Array | int) -> "PagedStep":
        """The same in the pages of the layer in this place among those of its kind."""
        first = place * self.sizes.pages
        tables = None if self.tables is None else self.tables.moved(first)
        return replace(self, table=self.table + first, tables=tables)


def paged_sizes(
    cache: KVCache, tokens: tuple[int, ...], heads: int, config: AttentionConfig, biased: bool = False
) -> PagedSizes:
    """Of `tokens`, batch and seq. Raises as `causal_window`."""
    latent = "latent" in cache
    pages = cache["latent" if latent else "key"]
    spec = _token_spec(latent)
    batch_shards, head_shards = (num_shards(entries(spec[i])) for i in (0, 2))
    rows, (layers, count) = tokens[0] // batch_shards, pages.shape[1:3]
    kv_heads = 1 if latent else pages.shape[-3] // head_shards
    shape = (rows * layers * count, kv_heads, *pages.shape[-2:])
    window = causal_window(config.mask)
    return PagedSizes(rows, tokens[1], heads // head_shards, (shape, pages.dtype), count, biased, window)


def paged_step(sizes: PagedSizes, where: Array | Ragged) -> PagedStep:
    """Of new tokens that follow as many as `where` says in each row; or of many sequences' in one row."""
    lens, table, bounds = _of_ragged(sizes, where) if isinstance(where, Ragged) else _of_rows(sizes, where)
    shape, dtype = sizes.cache
    shapes = ((sizes.rows * sizes.seq, sizes.heads, shape[3]), shape)
    q, keys = (cast(Array, jax.ShapeDtypeStruct(one, dtype)) for one in shapes)  # only these count
    tables = paged_attention_tables(q, Cache(keys, keys), lens, table, bounds, biased=sizes.biased)
    return PagedStep(sizes, lens, table, bounds, tables)


def _of_ragged(sizes: PagedSizes, ragged: Ragged) -> tuple[Array, Array, Array]:
    if sizes.rows != 1:
        raise ValueError(f"a step of many sequences has them in one row of `batch`, and here are {sizes.rows}")
    return ragged.lens, ragged.tables[ragged.windows.index(sizes.window)], ragged.bounds


def _of_rows(sizes: PagedSizes, start: Array) -> tuple[Array, Array, Array]:
    """Lengths, page table and bounds of rows that are a sequence each, whose pages follow each other."""
    rows, seq, own = sizes.rows, sizes.seq, sizes.cache[0][0] // sizes.rows
    table = jnp.arange(rows, dtype=jnp.int32)[:, None] * own + jnp.arange(1, sizes.pages, dtype=jnp.int32)
    return jnp.full(rows, start + seq, jnp.int32), table, seq * jnp.arange(rows + 1, dtype=jnp.int32)


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
        bias: by distance, likewise, with a last axis `_distances`, for as many keys as `positions_of` says.

    Returns: `batch seq heads head_dim`, and the cache. Raises `UserError` for another mask.
    """

    def local(step, q, k, v, pages, *of_heads):
        return _over_pages(config, step, q, k, v, pages, *(None if x is None else x[0, 0] for x in of_heads))

    pages, scope = _pages(cache), axes.current()
    if scope is None:
        out, pages = local(step, q, k, v, pages, sinks, bias)
        return out, _named(pages)
    tokens = _token_spec(latent=False)
    of_pages = jax.tree.map(lambda x: scope.placement.spec(parse_names((PAGES, SCALES)[x.ndim == 5])), pages)
    of_sinks = None if sinks is None else PartitionSpec(*tokens[:3])
    of_bias = None if bias is None else tokens
    specs = (tokens, tokens, tokens, of_pages, of_sinks, of_bias)
    run = axes.per_device(local, (_everywhere(step), *specs), (tokens, of_pages))
    out, pages = run(step, *jax.tree.map(axes.reshard, (q, k, v, pages, sinks, bias), specs))
    return axes.reshard(out, scope.placement.spec(parse_names(QUERIES))), _named(pages)


def _pages(cache: KVCache) -> Cache:
    return Cache(cache["key"], cache["value"], cache.get("key_scale"), cache.get("value_scale"))


def _named(pages: Cache) -> KVCache:
    named = {"key": pages.keys, "value": pages.values, "key_scale": pages.key_scales, "value_scale": pages.value_scales}
    return {name: array for name, array in named.items() if array is not None}


def latent_cache_specs(batch: int, length: int, width: int) -> dict[str, CacheSpec]:
    """Room for `length` latents of each sequence, of `width` numbers, in the compute dtype."""
    scope = axes.current()
    shape = (batch, 1, 1 + -(-length // PAGE), PAGE, width)
    dtype = jnp.float32 if scope is None else scope.compute
    return {"latent": CacheSpec(parse_names(LATENT_PAGES), shape, dtype, cache_kind="pages")}


def cached_latent_attention(
    q: Array, k: Array, config: AttentionConfig, cache: KVCache, step: PagedStep
) -> tuple[Array, KVCache]:
    """Attention of new tokens over the latents of all of their sequences' so far, each the key and the value of every
    head, and the cache with theirs in it.

    Args: as of `cached_attention`, but `q[batch seq heads key_latent]` and `k[batch seq key_latent]`.

    Returns: `batch seq heads key_latent`, and the cache.
    """

    def local(step, q, k, latents):
        k, pages = k[:, :, None], latents[:, :, :, None]
        out, written = _over_pages(config, step, q, k, k, Cache(pages, pages))
        return out, written.keys[:, :, :, 0]

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
    return PartitionSpec(queries[0], None, queries[2] if latent else pages[3], None)


def _everywhere(step: PagedStep) -> PagedStep:
    """The specs of a step's arrays."""
    return jax.tree.map(lambda _: PartitionSpec(), step)


def _over_pages(
    config: AttentionConfig,
    step: PagedStep,
    q: Array,
    k: Array,
    v: Array,
    pages: Cache,
    sinks: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, Cache]:
    """A device's own part: the result, and the pages, which have leading axes `batch _layers`. `sinks`: `heads`;
    `bias`: `heads distances`."""
    paged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), pages)
    new_q, new_k, new_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    options = {"window": causal_window(config.mask), "scale": config.scale, "soft_cap": config.soft_cap}
    given = {"sinks": sinks, "distance_bias": bias, "tables": step.tables}
    ragged = (step.lens, step.table, step.bounds)
    out, paged = paged_attention(new_q, new_k, new_v, paged, *ragged, **given, **options)
    return out.reshape(q.shape), jax.tree.map(lambda x, before: x.reshape(before.shape), paged, pages)
