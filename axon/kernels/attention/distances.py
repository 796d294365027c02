"""A bias of scores by the distance of key and query: what a block of them has of it, and its gradient."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Distances(NamedTuple):
    """The distances of a block of `queries` and `keys`: consecutive elements of the bias, from `first` on, of which
    query q and key k have the one at `queries − 1 − q + k`."""

    first: Array | int
    queries: int
    keys: int

    @property
    def count(self) -> int:
        return self.queries + self.keys - 1


def by_distance(bias: Array, block: Distances) -> Array:
    """`kv_heads groups queries keys` of `bias[kv_heads groups distances]`."""
    own = lax.dynamic_slice_in_dim(bias, block.first, block.count, axis=-1)
    return own[..., block.queries - 1 - jnp.arange(block.queries)[:, None] + jnp.arange(block.keys)]


def add_by_distance(total: Array, dscores: Array, block: Distances) -> Array:
    """`total[kv_heads groups distances]` with a block's `dscores[rows groups·queries keys]` added to its elements.

    Each diagonal is summed as a column: with as many zeros after each row as there are queries, and one element less a
    row, row r moves r columns to the right.
    """
    kv_heads, groups, _ = total.shape
    scores = dscores.reshape(-1, kv_heads, groups, block.queries, block.keys).sum(0)[..., ::-1, :]
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (0, block.queries)))
    sheared = padded.reshape(kv_heads, groups, -1)[..., : block.queries * block.count]
    own = sheared.reshape(kv_heads, groups, block.queries, block.count).sum(-2)
    before = lax.dynamic_slice_in_dim(total, block.first, block.count, axis=-1)
    return lax.dynamic_update_slice_in_dim(total, before + own, block.first, axis=-1)
