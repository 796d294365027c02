"""Scores of a part of a tile of queries and a part of a tile of keys, `keys rows`, for the backward TPU kernel.

Rows are those of each head of a group for one block of queries, then those of the next block.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.attention.backward_tiles import Rectangle, Tiling
from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.attention.tpu_scores import LOG2E, MASKED, capped, matmul


@dataclass(frozen=True)
class Part:
    """A rectangle of a pair of tiles whose first query and first key have the indices `query` and `key`."""

    cut: Tiling
    rectangle: Rectangle
    query: Any
    key: Any

    @property
    def rows(self) -> slice:
        """Of the rows of a tile."""
        first, last = self.rectangle.queries
        return slice(first * self.cut.block.rows, last * self.cut.block.rows)

    @property
    def keys(self) -> slice:
        """Of the keys of a tile."""
        first, last = self.rectangle.keys
        return slice(first * self.cut.block.keys, last * self.cut.block.keys)

    def of_queries(self, tile: Any) -> Array:
        """The rows of a reference to `group queries width`, `rows width`."""
        size = self.cut.block.queries
        blocks = [tile[:, block * size : (block + 1) * size, :] for block in range(*self.rectangle.queries)]
        return jnp.concatenate([block.reshape(self.cut.block.rows, tile.shape[-1]) for block in blocks])

    def indices(self) -> tuple[Array, Array]:
        """The indices of the queries among the keys, `1 rows`, and of the keys, `keys 1`."""
        block, rows, keys = self.cut.block, self.rows, self.keys
        row = rows.start + lax.broadcasted_iota(jnp.int32, (1, rows.stop - rows.start), 1)
        of_row = row if block.group == 1 else row // block.rows * block.queries + lax.rem(row, block.queries)
        return self.query + of_row, self.key + keys.start + lax.broadcasted_iota(
            jnp.int32, (keys.stop - keys.start, 1), 0
        )


def part_scores(
    q: Array, k: Array, config: AttentionConfig, part: Part, alibi_slopes: Any
) -> tuple[Array, Array | None]:
    """`q[rows head_dim]`, `k[keys head_dim]` → `keys rows` in base 2; and, with a soft cap, its slope there."""
    found, slope = capped(matmul(k, q, (1, 1)), config)
    if alibi_slopes is not None:
        query, key = part.indices()
        found += alibi_slopes[:, part.rows] * LOG2E * (key - query).astype(jnp.float32)
    return found, slope


def part_masked(found: Array, config: AttentionConfig, part: Part, documents: tuple[Array, Array] | None) -> Array:
    """The scores, with `MASKED` for pairs that the mask does not allow; `documents`: `1 rows` and `keys 1` of tiles."""
    query, key = part.indices()
    cut = None if documents is None else (documents[0][:, part.rows], documents[1][part.keys])
    seen = config.mask.allowed(query, key, cut)
    tile = part.cut.tile
    if tile.key_tiles * tile.keys > tile.real_keys:
        real = key < tile.real_keys
        seen = real if seen is None else seen & real
    return found if seen is None else jnp.where(seen, found, MASKED)


def column(x: Array) -> Array:
    """`1 keys` → `keys 1`."""
    return jnp.broadcast_to(x, (8, x.shape[1])).T[:, :1]
