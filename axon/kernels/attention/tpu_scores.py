"""Scores in base 2, for which the hardware has an exponential, and which pairs are seen: for both TPU kernels."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.attention.tiles import Grid, Reach

LOG2E = math.log2(math.e)

MASKED = -1e38
"""The score of a masked pair. Below `LEAST`, so that its weight is zero whatever the maximum."""

LEAST = -1e30
"""Where the running maximum begins."""


class PerRow(NamedTuple):
    """A number for each row of a tile of queries, on lanes, or None: documents, sinks and ALiBi slopes."""

    documents: Any
    sinks: Any
    alibi_slopes: Any


class Pair(NamedTuple):
    """A tile of queries and one of keys: their numbers, and that of their row of the tables."""

    table: Array | int
    query: Array
    key: Array


def matmul(a: Array, b: Array, summed: tuple[int, int]) -> Array:
    """A product with float32 sums; float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((summed[0],), (summed[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def capped(found: Array, config: AttentionConfig) -> tuple[Array, Array | None]:
    """Products q·k → scores in base 2; and, with a soft cap, its slope there."""
    return bent(found * factor(config), config)


def factor(config: AttentionConfig) -> float:
    """The factor of products q·k before `bent`."""
    return config.scale * (LOG2E if config.soft_cap is None else 1 / config.soft_cap)


def bent(scaled: Array, config: AttentionConfig) -> tuple[Array, Array | None]:
    """Products q·k times `factor` → scores in base 2; and, with a soft cap, its slope there."""
    if config.soft_cap is None:
        return scaled, None
    bent = jnp.tanh(scaled)
    return bent * (config.soft_cap * LOG2E), 1 - bent * bent


def sees_all(config: AttentionConfig, grid: Grid, reach: Reach, pair: Pair, key_tiles: int = 1) -> Array:
    """Whether every query of the tile sees every key of so many tiles, from the pair's on: there is nothing to mask.

    A step of the grid may have no pair of tiles, and a number beyond the last: it is read as the last, whose documents
    are there to read.
    """
    query, key = reach.start[0] + pair.query * grid.queries, pair.key * grid.keys
    seen = config.mask.sees_all(query, query + grid.queries, key, key + key_tiles * grid.keys)
    seen &= key + key_tiles * grid.keys <= grid.real_keys
    if reach.query_document is None or reach.key_document is None:
        return seen
    of_query = pair.table * grid.query_tiles + jnp.minimum(pair.query, grid.query_tiles - 1)
    least, most = (table[of_query] for table in reach.query_document)
    seen &= least == most
    for tile in range(key_tiles):
        of_key = pair.table * grid.key_tiles + jnp.minimum(pair.key + tile, grid.key_tiles - 1)
        for table in reach.key_document:
            seen &= table[of_key] == least
    return seen


def table_row(reach: Reach) -> Array | int:
    """The row of the tables for the current sequence: all share one where there are no documents."""
    return 0 if reach.query_document is None else pl.program_id(0)
