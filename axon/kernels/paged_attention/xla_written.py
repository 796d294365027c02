"""Attention's sums over pages written out, for CPUs: each term is an operation of one loop, which reads the pages where
they lie. So the order of a sum is the one here, however many rows are computed with it, and a query that decodes copies
nothing, where a product would take a copy of all pages to read it once.

Of a head's numbers every `LANES`th is added up first, as vectors, and then these; of tokens `SLOTS` at a time. A sum of
sums has no product of its own: one would be rounded with the addition where both are in one loop, and else before it.
"""

import math
from collections.abc import Iterable
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax

from axon.kernels.paged_attention.xla_product import gather, product

LANES, SLOTS = 16, 8

SHARED = 2**16
"""Numbers of a block's keys, in one step, that are worth a second core. XLA makes a loop without a product one kernel,
on one core: the fastest for few numbers, of which an operation would take less time than to begin it on two."""


def fits(head_dim: int, page_size: int, group: int) -> bool:
    """Whether each key is read for one head (for more of them products are faster), there are terms for sums of sums,
    and XLA keeps what is one loop here apart: until jax 0.12 it makes one of several that a barrier divides."""
    return group == 1 and head_dim % 2 == page_size % 2 == 0 and jax.__version_info__ >= (0, 12)


def scores(q: Array, keys: Array, pages: Array) -> Array:
    """`blocks kv_heads rows (pages page_size)` of `q[blocks kv_heads rows head_dim]`."""
    found = _scores_of_one if q.shape[2] == 1 else _scores_of_many
    return lax.optimization_barrier(found(q, keys, pages, min(math.gcd(keys.shape[3], LANES), keys.shape[3] // 2)))


def sums(weights: Array, values: Array, pages: Array) -> Array:
    """`blocks kv_heads rows head_dim` of `weights[blocks kv_heads rows (pages page_size)]`."""
    found = _sums_of_one if weights.shape[2] == 1 else _sums_of_many
    return found(lax.optimization_barrier(weights), values, pages, math.gcd(values.shape[2], SLOTS))


def total(weights: Array, values: Array) -> Array:
    """`blocks kv_heads rows`: the weights' sum."""
    if weights.shape[1] * weights.shape[3] * values.shape[3] >= SHARED:
        return product(weights, jnp.ones((*weights.shape[:2], weights.shape[3], 1), weights.dtype))[..., 0]
    lanes = math.gcd(weights.shape[3], LANES)
    parts = lax.optimization_barrier(_sum(jnp.split(weights, weights.shape[3] // lanes, axis=3)))
    return _sum(parts[..., lane] for lane in range(lanes))


def _scores_of_one(q: Array, keys: Array, pages: Array, lanes: int) -> Array:
    keys = rearrange(keys, "all h page_size (parts lanes) -> all h page_size parts lanes", lanes=lanes)
    q = rearrange(q, "blocks h 1 (parts lanes) -> parts blocks 1 h 1 lanes", lanes=lanes)
    read = lambda part: keys.at[pages, :, :, part].get(mode="clip").astype(q.dtype)  # noqa: E731
    of_lanes = lax.optimization_barrier(_sum(one * read(part) for part, one in enumerate(q)))
    found = _sum(of_lanes[..., lane] for lane in range(lanes))
    return rearrange(found, "blocks pages h page_size -> blocks h 1 (pages page_size)")


def _scores_of_many(q: Array, keys: Array, pages: Array, lanes: int) -> Array:
    k = lax.optimization_barrier(gather(keys, pages).astype(q.dtype))
    q = lax.optimization_barrier(q.swapaxes(2, 3))  # the rows are the vectors here
    term = lambda at: q[:, :, None, at] * k[..., at, None]  # noqa: E731
    found = _sum(_sum(term(at) for at in range(lane, q.shape[2], lanes)) for lane in range(lanes))
    return lax.optimization_barrier(found).swapaxes(2, 3)


def _sums_of_one(weights: Array, values: Array, pages: Array, slots: int) -> Array:
    values = rearrange(values, "all h (parts slots) head_dim -> all h parts slots head_dim", slots=slots)
    pattern = "blocks h 1 (pages parts slots) -> slots blocks pages h parts 1"
    weights = rearrange(weights, pattern, pages=pages.shape[1], slots=slots)
    read = lambda slot: values.at[pages, :, :, slot].get(mode="clip").astype(weights.dtype)  # noqa: E731
    of_parts = lax.optimization_barrier(_sum(one * read(slot) for slot, one in enumerate(weights)))
    of_parts = rearrange(of_parts, "blocks pages h parts head_dim -> (pages parts) blocks h 1 head_dim")
    return _sum(of_parts)


def _sums_of_many(weights: Array, values: Array, pages: Array, slots: int) -> Array:
    v = lax.optimization_barrier(gather(values, pages).astype(weights.dtype))
    term = lambda at: weights[..., at, None] * v[:, :, None, at]  # noqa: E731
    return _sum(_sum(term(at) for at in range(first, first + slots)) for first in range(0, v.shape[2], slots))


def _sum(terms: Iterable[Array]) -> Array:
    return reduce(add, terms)
