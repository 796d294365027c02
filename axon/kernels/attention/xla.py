"""Attention in plain XLA: blocks of queries, each against only the keys that its mask can reach.

Causal attention so does half the work of the dense formula, a window a fraction, and no `seq × seq` array exists.
The backward is FlashAttention's (Dao, arXiv:2307.08691, algorithm 2): of the softmax only each query's log-sum-exp is
kept, and a block's weights are made again; rows that are short keep the weights themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.attention.mask import Documents, Mask

BLOCK = 64
"""Queries a block, at least: on a CPU the score block then stays in its cache."""

BLOCKS = 16
"""Blocks of queries, at most, so that long sequences do not make long programs."""

KEPT = 512
"""Keys up to which the weights are kept: they are no larger than the layer's other activations, and cost an exp and a
product to make again."""

MASKED = float(jnp.finfo(jnp.float32).min)


def attention_xla(q: Array, k: Array, v: Array, mask: Mask, documents: Documents, start: int, scale: float) -> Array:
    """See `axon.kernels.attention.attention`."""
    batch, queries, heads, width = q.shape
    kv_heads = k.shape[2]
    plan = _plan(mask, queries, k.shape[1], start)
    seen = [_seen(mask, block, documents) for block in plan]
    q = (q * jnp.asarray(scale, q.dtype)).reshape(batch, queries, kv_heads, heads // kv_heads, width)
    q = lax.transpose(q, (0, 2, 3, 1, 4)).reshape(batch * kv_heads, heads // kv_heads, queries, width)
    k, v = (lax.transpose(x, (0, 2, 1, 3)).reshape(batch * kv_heads, -1, x.shape[3]) for x in (k, v))
    out = _blocks(plan, keep=k.shape[1] <= KEPT)(q, k, v, seen)
    out = out.reshape(batch, kv_heads, heads // kv_heads, queries, -1)
    return lax.transpose(out, (0, 3, 1, 2, 4)).reshape(batch, queries, heads, -1)


@dataclass(frozen=True)
class _Block:
    """Queries `[first, last)` against keys `[low, high)`; `offset` is the place of query 0 among the keys."""

    first: int
    last: int
    low: int
    high: int
    offset: int


def _plan(mask: Mask, queries: int, keys: int, start: int) -> list[_Block]:
    size = max(BLOCK, -(-queries // BLOCKS))
    blocks = []
    for first in range(0, queries, size):
        last = min(first + size, queries)
        low, high = mask.keys(start + first, start + last, keys)
        low = min(low, keys - 1)
        blocks.append(_Block(first, last, low, max(high, low + 1), start))  # one key at least, perhaps unseen
    return blocks


def _seen(mask: Mask, block: _Block, documents: Documents) -> Array | None:
    """Booleans `batch queries keys`, or None where the block needs no mask."""
    first, last = block.first + block.offset, block.last + block.offset
    if mask.sees_all(first, last, block.low, block.high):
        return None
    pairs = documents and (
        documents[0][:, block.first : block.last, None],
        documents[1][:, None, block.low : block.high],
    )
    return mask.allowed(jnp.arange(first, last)[:, None], jnp.arange(block.low, block.high)[None, :], pairs)


def _blocks(plan: Sequence[_Block], keep: bool) -> Callable[..., Array]:
    """Of scaled `q[rows groups queries head_dim]` to `k, v[rows keys head_dim]`; a row is a batch row's kv head.

    The masks are arguments: closed over, they would be lost where a remat policy takes the function apart.
    """

    @jax.custom_vjp
    def attend(q, k, v, seen):
        return forward(q, k, v, seen)[0]

    def forward(q, k, v, seen):
        made = [_forward(*_cut(block, q, k, v), visible) for block, visible in zip(plan, seen, strict=True)]
        out = jnp.concatenate([_ungrouped(out, q) for out, _, _ in made], axis=2).astype(q.dtype)
        return out, (q, k, v, seen, [weights if keep else lse for _, weights, lse in made])

    def backward(kept, dout):
        q, k, v, seen, saved = kept
        dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        for block, visible, own in zip(plan, seen, saved, strict=True):
            parts = _cut(block, q, k, v)
            weights = own if keep else jnp.exp(_scores(*parts[:2], visible) - own)
            made = _backward(*parts, weights, _rows(dout, block))
            dq.append(_ungrouped(made[0], q))
            around = ((0, 0), (block.low, k.shape[1] - block.high), (0, 0))
            dk, dv = dk + jnp.pad(made[1], around), dv + jnp.pad(made[2], around)
        return jnp.concatenate(dq, axis=2).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None

    attend.defvjp(forward, backward)
    return attend


def _cut(block: _Block, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    return _rows(q, block), k[:, block.low : block.high], v[:, block.low : block.high]


def _rows(x: Array, block: _Block) -> Array:
    """`rows groups queries head_dim` → the block's, as `rows groups·queries head_dim`."""
    return x[:, :, block.first : block.last].reshape(x.shape[0], -1, x.shape[3])


def _ungrouped(x: Array, like: Array) -> Array:
    return x.reshape(x.shape[0], like.shape[1], -1, x.shape[-1])


def _scores(q: Array, k: Array, seen: Array | None) -> Array:
    """`rows groups·queries keys`, float32, what is not seen at the lowest number there is."""
    scores = _dot(q, k, (2, 2))
    if seen is None:
        return scores
    seen = seen.reshape(-1, *seen.shape[-2:])
    shape = (seen.shape[0], scores.shape[0] // seen.shape[0], scores.shape[1] // seen.shape[1], *seen.shape[1:])
    return jnp.where(seen[:, None, None], scores.reshape(shape), MASKED).reshape(scores.shape)


def _forward(q: Array, k: Array, v: Array, seen: Array | None) -> tuple[Array, Array, Array]:
    """The output, the weights, and each query's log-sum-exp: infinite, so that no weight is left, if it sees none."""
    scores = _scores(q, k, seen)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    lse = jnp.where(top > MASKED, top + jnp.log(total), jnp.inf)
    # Divided here, not after the product, so that what is kept is what the backward needs.
    weights = (weights * jnp.where(top > MASKED, 1 / total, 0)).astype(v.dtype)
    return _dot(weights, v, (2, 1)), weights, lse


def _backward(q: Array, k: Array, v: Array, weights: Array, dout: Array) -> tuple[Array, Array, Array]:
    """Gradients of the block's `q`, `k` and `v`."""
    dweights = _dot(dout, v, (2, 2))
    dscores = weights * (dweights - jnp.sum(weights * dweights, axis=-1, keepdims=True))
    dscores, weights = dscores.astype(q.dtype), weights.astype(q.dtype)
    return _dot(dscores, k, (2, 1)), _dot(dscores, q, (1, 1)), _dot(weights, dout, (1, 1))


def _dot(a: Array, b: Array, summed: tuple[int, int]) -> Array:
    return lax.dot_general(a, b, (((summed[0],), (summed[1],)), ((0,), (0,))), preferred_element_type=jnp.float32)
