"""One block of attention in plain XLA: its scores, its output and its gradients.

The backward is FlashAttention's (Dao, arXiv:2307.08691, algorithm 2): of the softmax only each query's log-sum-exp is
needed.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.attention.distances import Distances, by_distance
from axon.kernels.attention.fp8 import E4M3, FP8Products, whole

LOG2E = math.log2(math.e)

MASKED = float(jnp.finfo(jnp.float32).min)


LEAST = -1e30
"""What a row's greatest score is taken for where it sees no key, and scores are told from a whole number."""


class Part(NamedTuple):
    """A block's operands: `q[rows groups·queries head_dim]`, `k, v[rows keys head_dim]`, and for each query `sink`
    and for each of its keys `bias`, or None; `seen[batch queries keys]`: whether the mask allows a pair, None: all;
    `scale`: of the products q·k."""

    q: Array
    k: Array
    v: Array
    sink: Array | None
    bias: Array | None
    seen: Array | None
    scale: float


def _scores(part: Part, cap: float | None) -> tuple[Array, Array | None]:
    """`rows groups·queries keys`, float32, `MASKED` where not seen; and, of a soft cap, its slope."""
    scores, slope, seen = _dot(part.q, part.k, (2, 2)) * part.scale, None, part.seen
    if cap is not None:
        bent = jnp.tanh(scores / cap)
        scores, slope = cap * bent, 1 - bent**2
    if part.bias is not None:
        scores += part.bias
    if seen is None:
        return scores, slope
    seen = seen.reshape(-1, *seen.shape[-2:])
    shape = (seen.shape[0], scores.shape[0] // seen.shape[0], scores.shape[1] // seen.shape[1], *seen.shape[1:])
    return jnp.where(seen[:, None, None], scores.reshape(shape), MASKED).reshape(scores.shape), slope


def forward_block(part: Part, cap: float | None, products: FP8Products | None) -> tuple[Array, Array, Array]:
    """The output, the weights, and each query's log-sum-exp: infinite, so that no weight is left, if it sees none.

    With `products` the part's operands are those of `axon.kernels.attention.fp8.emulated_operands`.
    """
    scores, _ = _scores(part, cap)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if part.sink is not None:
        top = jnp.maximum(top, part.sink)
    sees_some = top > MASKED
    if products is not None:
        top = whole(jnp.maximum(top, LEAST) * LOG2E) / LOG2E
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if part.sink is not None:
        total += jnp.exp(part.sink - top)
    lse = jnp.where(sees_some, top + jnp.log(total), jnp.inf)
    total = jnp.where(sees_some, total, jnp.inf)
    # Divided after the product, as in paged attention, of which the sums on a CPU are then these, bit for bit.
    rounded = weights if products is None else weights.astype(E4M3)
    out = _dot(rounded.astype(part.v.dtype), part.v, (2, 1)) / total
    return out, (weights / total).astype(part.v.dtype), lse


def with_bias(part: Part, bias: Array, distances: Distances) -> Part:
    """The part with its `bias[kv_heads groups distances]`, besides that of slopes."""
    found = by_distance(bias, distances)
    times = part.q.shape[0] // found.shape[0]
    found = jnp.broadcast_to(found, (times, *found.shape)).reshape(part.q.shape[0], -1, found.shape[-1])
    return part._replace(bias=found if part.bias is None else part.bias + found)


class BlockGradients(NamedTuple):
    """Of the operands of a `Part`; `scores`: of the scores with their bias."""

    q: Array
    k: Array
    v: Array
    sink: Array | None
    scores: Array


def backward_block(
    part: Part,
    cap: float | None,
    weights: Array | None,
    lse: Array,
    dout: Array,
    dlse: Array | float = 0.0,
    total: Array | None = None,
) -> BlockGradients:
    """Gradients of the block's operands. `total` is D of each query, Σ out·dout − dlse; computed here from `dlse` where
    these are all of the query's keys."""
    slope = None
    if weights is None:
        scores, slope = _scores(part, cap)
        weights = jnp.exp(scores - lse)
    dweights = _dot(dout, part.v, (2, 2))
    if total is None:
        total = jnp.sum(weights * dweights, axis=-1, keepdims=True) - dlse
    dscores = weights * (dweights - total)
    dproducts = part.scale * (dscores if slope is None else dscores * slope)
    dproducts, weights = dproducts.astype(part.q.dtype), weights.astype(part.q.dtype)
    return BlockGradients(
        _dot(dproducts, part.k, (2, 1)),
        _dot(dproducts, part.q, (1, 1)),
        _dot(weights, dout, (1, 1)),
        None if part.sink is None else -jnp.exp(part.sink - lse) * total,
        dscores,
    )


def _dot(a: Array, b: Array, summed: tuple[int, int]) -> Array:
    return lax.dot_general(a, b, (((summed[0],), (summed[1],)), ((0,), (0,))), preferred_element_type=jnp.float32)
