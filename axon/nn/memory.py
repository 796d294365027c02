"""What a model remembers of its rows while it generates: the keys and values of their tokens, in pages.

Each row has pages of its own, the first of them padding's (`axon.kernels.paged_attention`), so rows and heads split
over devices as they do without a memory.
"""

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import shard
from axon.axes.patterns import parse_names
from axon.kernels.attention import Mask, causal_window
from axon.kernels.paged_attention import Cache, paged_attention

Memory = dict[str, Array]
"""`key` and `value`, each `batch pages kv_heads page_size head_dim`; with `layers` before, those of a whole model."""

PAGE = 64
"""Tokens a page."""

PAGES = "batch pages kv_heads page_size head_dim.whole"
QUERIES = "batch seq heads head_dim"


def empty(layers: int, batch: int, length: int, kv_heads: int, head_dim: int) -> Memory:
    """Room for `length` tokens in each row of each layer, in the compute dtype."""
    scope = axes.current()
    shape = (layers, batch, 1 + -(-length // PAGE), kv_heads, PAGE, head_dim)
    zeros = jnp.zeros(shape, jnp.float32 if scope is None else scope.compute)
    return dict.fromkeys(("key", "value"), shard(zeros, f"layers {PAGES}"))


def recall(q: Array, k: Array, v: Array, mask: Mask, memory: Memory, start: Array) -> tuple[Array, Memory]:
    """Attention of new tokens over all of their rows' so far, and the memory with theirs in it.

    Args:
        q: `batch seq heads head_dim`; k, v: `batch seq kv_heads head_dim`, of the tokens from `start` on.
        mask: causal, and perhaps with a window; documents are those of one row.

    Returns: `batch seq heads head_dim`, and the memory. Raises `UserError` for another mask.
    """
    window, scope = causal_window(mask), axes.current()

    def local(q, k, v, keys, values, start):
        (rows, seq), pages = q.shape[:2], keys.shape[1]
        cache = Cache(keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:]))
        table = jnp.arange(rows, dtype=jnp.int32)[:, None] * pages + jnp.arange(1, pages, dtype=jnp.int32)
        lens, bounds = jnp.full(rows, start + seq, jnp.int32), seq * jnp.arange(rows + 1, dtype=jnp.int32)
        new_q, new_k, new_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        out, cache = paged_attention(new_q, new_k, new_v, cache, lens, table, bounds, window=window)
        return out.reshape(q.shape), cache.keys.reshape(keys.shape), cache.values.reshape(values.shape)

    operands = (q, k, v, memory["key"], memory["value"])
    if scope is None:
        out, *kept = local(*operands, start)
        return out, dict(zip(memory, kept, strict=True))
    wanted = scope.placement.spec(parse_names(QUERIES))
    kept_at = scope.placement.spec(parse_names(PAGES))
    # Whole rows of tokens; and where kv_heads are split less than heads, all heads of those that are here.
    tokens = PartitionSpec(wanted[0], None, kept_at[2], None)
    specs = (tokens, tokens, tokens, kept_at, kept_at)
    moved = (axes.reshard(x, spec) for x, spec in zip(operands, specs, strict=True))
    run = axes.per_device(local, (*specs, PartitionSpec()), (tokens, kept_at, kept_at))
    out, *kept = run(*moved, start)
    return axes.reshard(out, wanted), dict(zip(memory, kept, strict=True))
