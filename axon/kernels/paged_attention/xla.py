"""Paged attention in plain XLA: a few blocks of queries in one batch, each over its own pages, a few at a time.

An online softmax (Milakov and Gimelshein, arXiv:1805.02867) over the pages that some query of these blocks sees: as
many steps as the block of them with the most pages needs, whatever the table has room for. The gathered pages of one
step are small enough for a cache, and lie as the product wants them.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax

from axon.axes import platform
from axon.kernels.paged_attention import xla_product, xla_written
from axon.kernels.paged_attention.blocks import Blocks, of_rows, split
from axon.kernels.paged_attention.cache import Cache, write
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.kernels.paged_attention.xla_product import gather
from axon.kernels.paged_attention.xla_tables import XlaTables, tables_xla

KEYS = 64
"""Positions a step, about: on a CPU 64 is the fastest of 64 to 256."""

TOGETHER = 4
"""Blocks computed together, each taking as many steps as the one of them that needs most."""

MASKED = float(jnp.finfo(jnp.float32).min)


def paged_attention_xla(
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    inputs: AttentionInputs,
    config: AttentionConfig,
    tables: XlaTables | None = None,
) -> tuple[Array, Cache]:
    """See `axon.kernels.paged_attention.paged_attention`. Scores and sums are float32 at least."""
    tables = tables or tables_xla(q.shape[0], inputs)
    cache = write(cache, k, v, inputs, tables.where)
    rows = [_of_kind(q, cache, plan, inputs, config) for plan in tables.kinds]
    out = jnp.concatenate(rows).at[tables.rows].get(mode="clip")
    return jnp.where(tables.where.real[:, None, None], out, 0).astype(q.dtype), cache


def _of_kind(q: Array, cache: Cache, plan: Blocks, inputs: AttentionInputs, config: AttentionConfig) -> Array:
    """`(blocks queries) heads head_dim` of all blocks of one kind, some at a time: those beside each other in their
    order see about as many keys, and of those without a query none is computed."""
    q = split(q, plan, cache.kv_heads).astype(jnp.promote_types(q.dtype, jnp.float32))
    count = len(q)
    index = jnp.minimum(jnp.arange(-(-count // TOGETHER) * TOGETHER), count - 1).reshape(-1, TOGETHER)
    if count <= TOGETHER:
        out = _attend(q, cache, plan, inputs, config)
    else:
        out = lax.map(lambda some: _attend(q[some], cache, plan.take(some), inputs, config), index)
        out = out.reshape(-1, *q.shape[1:])[:count]
    pattern = "blocks kv_heads (queries group) head_dim -> (blocks queries) (kv_heads group) head_dim"
    return rearrange(out, pattern, queries=plan.queries)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Running:
    """Of each row, the largest score so far, and the sums of exp(score - top) and of that times the values."""

    top: Array
    total: Array
    values: Array

    def with_more(self, top: Array, total: Array, values: Array) -> "_Running":
        """With one more step's sums, those so far brought down to the new largest score."""
        shrink = jnp.exp(self.top - top)
        return _Running(top, self.total * shrink + total, self.values * shrink[..., None] + values)


def _attend(q: Array, cache: Cache, plan: Blocks, inputs: AttentionInputs, config: AttentionConfig) -> Array:
    """`blocks kv_heads rows head_dim` → the same."""
    page_size, columns = cache.page_size, inputs.page_table.shape[1]
    width = min(max(1, KEYS // page_size), columns)
    # Steps begin at multiples of their width: so a key is in the same place of its step for all queries, and the bits
    # of a sum do not depend on which queries are in the block.
    first_keys = plan.first_keys(config.window)
    first = first_keys // (page_size * width) * width
    steps = jnp.max(-(-(plan.ends - first * page_size) // (page_size * width)))
    group = q.shape[2] // plan.queries
    written = platform() == "cpu" and xla_written.fits(cache.head_dim, page_size, group)
    form = xla_written if written else xla_product
    queries = plan.positions[:, None] + jnp.arange(plan.queries)
    queries = jnp.repeat(queries, group, axis=1)[:, None, :, None]
    slopes = of_rows(inputs.alibi_slopes, cache.kv_heads, plan.queries)

    def step(carry):
        index, running = carry
        column = first[:, None] + index * width + jnp.arange(width)
        pages = inputs.page_table[plan.sequences[:, None], jnp.minimum(column, columns - 1)]
        positions = (column[:, :, None] * page_size + jnp.arange(page_size)).reshape(len(pages), 1, -1)
        products = form.scores(q, cache.keys, pages)
        if cache.key_scales is not None:
            products = products * gather(cache.key_scales, pages)[:, :, None]
        seen, scores = config.seen(queries, positions[:, :, None]), config.finish(products)
        if inputs.distance_bias is not None:
            scores += _bias(inputs.distance_bias.astype(q.dtype), plan, positions, cache.kv_heads)
        if slopes is not None:
            scores += slopes[..., None] * (positions[:, :, None] - queries)
        scores = lax.optimization_barrier(jnp.where(seen, scores, MASKED))  # rounded: what is subtracted is one of them
        top = jnp.maximum(running.top, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
        total = form.total(weights, cache.values)
        if cache.value_scales is not None:
            weights = jnp.where(seen, weights * gather(cache.value_scales, pages)[:, :, None], 0)
        return index + 1, running.with_more(top, total, form.sums(weights, cache.values, pages))

    start = _begin(q, of_rows(inputs.sinks, cache.kv_heads, plan.queries))
    _, end = lax.while_loop(lambda carry: carry[0] < steps, step, (jnp.int32(0), start))
    return end.values / jnp.where(end.total == 0, 1, end.total)[..., None]


def _begin(q: Array, sinks: Array | None) -> _Running:
    """Before any key: nothing seen, or of each row its head's sink, whose weight is 1 and whose value is 0."""
    shape = q.shape[:3]
    if sinks is None:
        return _Running(jnp.full(shape, MASKED, q.dtype), jnp.zeros(shape, q.dtype), jnp.zeros_like(q))
    return _Running(jnp.broadcast_to(sinks.astype(q.dtype), shape), jnp.ones(shape, q.dtype), jnp.zeros_like(q))


def _bias(bias: Array, plan: Blocks, positions: Array, kv_heads: int) -> Array:
    """`blocks kv_heads rows keys` of a `bias[heads distances]`, of keys at `positions[blocks 1 keys]`."""
    queries = plan.positions[:, None] + jnp.arange(plan.queries)
    places = bias.shape[1] // 2 + positions - queries[:, :, None]
    pattern = "(kv_heads group) blocks queries keys -> blocks kv_heads (queries group) keys"
    return rearrange(bias.at[:, places].get(mode="clip"), pattern, kv_heads=kv_heads)
