"""Attention in plain XLA: blocks of queries, each against only the keys that its mask allows.

So causal attention takes half the work of the dense formula, a window a fraction, and no `seq × seq` array exists.
The backward is FlashAttention's (Dao, arXiv:2307.08691, algorithm 2): of the softmax only each query's log-sum-exp is
saved, and a block's weights are recomputed; for short sequences the weights themselves are saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.attention.distances import Distances, add_by_distance
from axon.kernels.attention.fp8 import emulated_operands
from axon.kernels.attention.mask import Documents, Mask
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs
from axon.kernels.attention.xla_block import Part, backward_block, forward_block, with_bias

BLOCK = 64
"""Queries a block, at least: on a CPU the score block then stays in its cache."""

BLOCKS = 16
"""Blocks of queries, at most, so that long sequences do not make long programs."""

SAVED = 512
"""Keys up to which the weights are saved: they are no larger than the layer's other activations, and recomputing them
takes an exp and a product."""


def attention_xla(
    q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs = AttentionInputs()
) -> tuple[Array, Array]:
    """See `axon.kernels.attention.attention_and_lse`; `inputs.start` is traced, or a constant."""
    (batch, queries, heads, _), kv_heads = q.shape, k.shape[2]
    plan, masks = _plan(config.mask, queries, k.shape[1], inputs.start), _Masks(inputs.documents, inputs.start)
    if isinstance(inputs.start, int):  # else each block has all keys, and masks of all pairs would be saved
        masks = [_seen(config.mask, block, masks) for block in plan]
    of_q, of_scores = _scales(q, config.scale)
    q = _grouped(q * jnp.asarray(of_q, q.dtype), kv_heads)
    k, v = (_by_head(x) for x in (k, v))
    sinks, alibi_slopes = (
        None if x is None else _per_row(x, batch, kv_heads) for x in (inputs.sinks, inputs.alibi_slopes)
    )
    bias = inputs.distance_bias
    bias = None if bias is None else bias.astype(jnp.float32).reshape(kv_heads, -1, bias.shape[1])
    # Saved weights would be those of rounded scores, and the backward's scores are not.
    save = k.shape[1] <= SAVED and config.soft_cap is None and config.products is None
    attend = _blocks(plan, config, of_scores, save)
    out, lse = attend(q, k, v, sinks, alibi_slopes, bias, masks)
    return _as_given(out, batch), lse.reshape(batch, heads, queries).swapaxes(1, 2)


def attention_gradients_xla(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    rows: tuple[Array, Array, Array],
) -> tuple[Array, Array, Array]:
    """See `axon.kernels.attention.attention_gradients`; there are neither slopes nor a bias."""
    batch, kv_heads, (of_q, of_scores) = q.shape[0], k.shape[2], _scales(q, config.scale)
    q, k, v = _grouped(q * jnp.asarray(of_q, q.dtype), kv_heads), _by_head(k), _by_head(v)
    dout, lse, total = (_grouped(x, kv_heads) for x in (rows[0], rows[1][..., None], rows[2][..., None]))
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for block in _plan(config.mask, q.shape[2], k.shape[1], inputs.start):
        seen = _seen(config.mask, block, _Masks(inputs.documents, inputs.start))
        part = _cut(block, q, k, v, None, None, seen, of_scores)
        of_rows = (_rows(x, block) for x in (lse, dout))
        gradients = backward_block(part, config.soft_cap, None, *of_rows, total=_rows(total, block))
        dq.append(_ungrouped(gradients.q, q))
        dk, dv = _added(dk, gradients.k, block), _added(dv, gradients.v, block)
    dq = _as_given(jnp.concatenate(dq, axis=2), batch) * of_q
    dk, dv = (x.reshape(batch, kv_heads, *x.shape[1:]).swapaxes(1, 2) for x in (dk, dv))
    return dq, dk, dv


def _scales(q: Array, scale: float) -> tuple[float, float]:
    """Of the queries, and of the scores: one of them is 1.

    Scores are float32, so scaling them rounds no more than the TPU kernel does. In 16 bits a scaled query would be
    rounded once more (unless the scale is a power of two); in float32 it is not, and is a smaller array.
    """
    return (scale, 1.0) if q.dtype.itemsize >= 4 else (1.0, scale)


def _grouped(x: Array, kv_heads: int) -> Array:
    """`batch seq heads head_dim` → `rows groups seq head_dim`, a row for each of `kv_heads` of a sequence."""
    batch, seq, heads, width = x.shape
    x = lax.transpose(x.reshape(batch, seq, kv_heads, heads // kv_heads, width), (0, 2, 3, 1, 4))
    return x.reshape(batch * kv_heads, heads // kv_heads, seq, width)


def _as_given(x: Array, batch: int) -> Array:
    """The inverse of `_grouped`."""
    rows, groups, seq, width = x.shape
    x = lax.transpose(x.reshape(batch, rows // batch, groups, seq, width), (0, 3, 1, 2, 4))
    return x.reshape(batch, seq, -1, width)


def _by_head(x: Array) -> Array:
    """`batch seq kv_heads head_dim` → `rows seq head_dim`."""
    return lax.transpose(x, (0, 2, 1, 3)).reshape(-1, x.shape[1], x.shape[3])


def _added(total: Array, part: Array, block: "_Block") -> Array:
    """`total[rows keys head_dim]` with a block's `part` added to its keys."""
    return total + jnp.pad(part, ((0, 0), (block.low, total.shape[1] - block.high), (0, 0)))


def _per_row(x: Array, batch: int, kv_heads: int) -> Array:
    """A number for each head → `rows groups 1 1`, float32."""
    x = jnp.broadcast_to(x.astype(jnp.float32).reshape(1, kv_heads, -1), (batch, kv_heads, x.shape[0] // kv_heads))
    return x.reshape(batch * kv_heads, -1, 1, 1)


class _Masks(NamedTuple):
    """What masks are made of: documents, and the place of the first query among the keys."""

    documents: Documents
    start: Array | int


@dataclass(frozen=True)
class _Block:
    """Queries `[first, last)` against keys `[low, high)`; `offset` is the place of query 0 among the keys, if known."""

    first: int
    last: int
    low: int
    high: int
    offset: int

    def start(self, masks: Any) -> Array | int:
        """The place of query 0 among the keys."""
        return masks.start if isinstance(masks, _Masks) else self.offset

    def distances(self, masks: Any, bias: Array) -> Distances:
        """Where those of its queries and keys are in a bias by distance."""
        keys = (bias.shape[-1] + 1) // 2
        return Distances(keys + self.low - self.start(masks) - self.last, self.last - self.first, self.high - self.low)


def _plan(mask: Mask, queries: int, keys: int, start: Array | int) -> list[_Block]:
    """Each block with the keys that its queries see; with all where only the running program knows these."""
    size = max(BLOCK, -(-queries // BLOCKS))
    blocks = []
    for first in range(0, queries, size):
        last = min(first + size, queries)
        if not isinstance(start, int):
            blocks.append(_Block(first, last, 0, keys, 0))
            continue
        low, high = map(int, mask.keys(start + first, start + last, keys))
        low = min(low, keys - 1)
        blocks.append(_Block(first, last, low, max(high, low + 1), start))  # one key at least, perhaps unseen
    return blocks


def _seen(mask: Mask, block: _Block, inputs: _Masks) -> Array | None:
    """Booleans `batch queries keys`, or None where the block needs no mask."""
    first, last = block.first + inputs.start, block.last + inputs.start
    apart = mask.by_document and inputs.documents is not None
    if not apart and isinstance(inputs.start, int) and mask.sees_all(first, last, block.low, block.high):
        return None
    pairs = inputs.documents and (
        inputs.documents[0][:, block.first : block.last, None],
        inputs.documents[1][:, None, block.low : block.high],
    )
    queries = inputs.start + jnp.arange(block.first, block.last)
    return mask.allowed(queries[:, None], jnp.arange(block.low, block.high)[None, :], pairs)


def _blocks(
    plan: Sequence[_Block], config: AttentionConfig, scale: float, save: bool
) -> Callable[..., tuple[Array, Array]]:
    """Of `q[rows groups queries head_dim]` to `k, v[rows keys head_dim]`; a row is a kv head of a sequence.

    The masks, or what they are made of, are arguments: as closed-over tracers they would leak where a remat policy
    splits the function.
    """
    cap = config.soft_cap

    def each(masks: Any) -> list[Array | None]:
        return [_seen(config.mask, block, masks) for block in plan] if isinstance(masks, _Masks) else masks

    @jax.custom_vjp
    def attend(q, k, v, sinks, alibi_slopes, bias, masks):
        return forward(q, k, v, sinks, alibi_slopes, bias, masks)[0]

    def parts(operands, masks):
        q, k, v, sinks, alibi_slopes, bias = operands
        for block, own in zip(plan, each(masks), strict=True):
            slopes = None if alibi_slopes is None else alibi_slopes * _ahead(block, block.start(masks))
            part = _cut(block, q, k, v, sinks, slopes, own, scale)
            yield block, part if bias is None else with_bias(part, bias, block.distances(masks, bias))

    def forward(q, k, v, sinks, alibi_slopes, bias, masks):
        operands = (q, k, v, sinks, alibi_slopes, bias)
        multiplied = operands if config.products is None else (*emulated_operands(q, k, v), *operands[3:])
        results = [forward_block(part, cap, config.products) for _, part in parts(multiplied, masks)]
        out = jnp.concatenate([_ungrouped(out, q) for out, _, _ in results], axis=2).astype(q.dtype)
        lse = jnp.concatenate([_ungrouped(lse, q) for _, _, lse in results], axis=2)
        saved = [(weights if save else None, lse) for _, weights, lse in results]
        kept = None if config.products is None else out
        return (out, jnp.where(lse == jnp.inf, -jnp.inf, lse)), (operands, masks, saved, kept)

    def backward(residuals, cotangents):
        operands, masks, saved, out = residuals
        (q, k, v, _, alibi_slopes, bias), (dout, dlse) = operands, cotangents
        # Where weights were rounded D is of the output, as in flash kernels and rings, not of recomputed weights.
        totals = None if out is None else jnp.sum(out.astype(jnp.float32) * dout, axis=-1, keepdims=True) - dlse
        dq, dsinks, dk, dv = [], [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        dbias = None if bias is None else jnp.zeros_like(bias)
        for (block, part), (weights, lse) in zip(parts(operands, masks), saved, strict=True):
            total = None if totals is None else _rows(totals, block)
            gradients = backward_block(part, cap, weights, lse, _rows(dout, block), _rows(dlse, block), total)
            dq.append(_ungrouped(gradients.q, q))
            dk, dv = _added(dk, gradients.k, block), _added(dv, gradients.v, block)
            if gradients.sink is not None:
                dsinks.append(jnp.sum(_ungrouped(gradients.sink, q), axis=2, keepdims=True))
            if dbias is not None and bias is not None:
                dbias = add_by_distance(dbias, gradients.scores, block.distances(masks, bias))
        dq = jnp.concatenate(dq, axis=2).astype(q.dtype)
        dslopes = None if alibi_slopes is None else jnp.zeros_like(alibi_slopes)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype), sum(dsinks) if dsinks else None, dslopes, dbias, None

    attend.defvjp(forward, backward)
    return attend


def _cut(
    block: _Block,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    slopes: Array | None,
    seen: Array | None,
    scale: float,
) -> Part:
    size = (q.shape[0], q.shape[1], block.last - block.first, 1)
    return Part(
        _rows(q, block),
        k[:, block.low : block.high],
        v[:, block.low : block.high],
        None if sinks is None else jnp.broadcast_to(sinks, size).reshape(q.shape[0], -1, 1),
        None if slopes is None else slopes.reshape(q.shape[0], -1, block.high - block.low),
        seen,
        scale,
    )


def _ahead(block: _Block, start: Array | int) -> Array:
    """How far each key is ahead of each query, `queries keys`."""
    return jnp.arange(block.low, block.high) - jnp.arange(block.first, block.last)[:, None] - start


def _rows(x: Array, block: _Block) -> Array:
    """`rows groups queries head_dim` → the block's, as `rows groups·queries head_dim`."""
    return x[:, :, block.first : block.last].reshape(x.shape[0], -1, x.shape[3])


def _ungrouped(x: Array, like: Array) -> Array:
    return x.reshape(x.shape[0], like.shape[1], -1, x.shape[-1])
