"""The inside of the forward TPU kernel: a tile of queries meets some keys, and what it knows of its rows.

Scores are `rows keys`, in base 2, for which the hardware has an exponential: K, and then V, is what the matrix unit
holds, and rows of Q, and then of P, stream past it. A number for each row is the same in all 128 lanes. The sum of the
powers is kept for each lane apart, and added up at the end.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.attention.fp8 import KEYS, QUERIES, whole
from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.attention.tiles import LANES, Grid, Reach
from axon.kernels.attention.tpu_scores import LEAST, LOG2E, MASKED, PerRow, bent, capped, factor, matmul


class State(NamedTuple):
    """Of each row, in VMEM: the maximum, `rows 128`; the sum of powers of each lane's keys, `rows 128`; the output."""

    top: Any
    total: Any
    sums: Any


class Columns(NamedTuple):
    """What each row sees, `rows 128` in VMEM, written once for a tile of queries; None for what there is not.

    Attributes:
        low, high: the first key that a row sees and one past the last, less the lane: of 128 keys from k on, those of
            the lanes with `low ≤ k < high`.
        documents: of the row. alibi_slopes: times log₂ e. distances: lane − query, float32.
    """

    low: Any
    high: Any
    documents: Any
    alibi_slopes: Any
    distances: Any


def state_shapes(grid: Grid, value_dim: int) -> State:
    """Scratch memory of the state."""
    row = pltpu.VMEM((grid.rows, LANES), jnp.float32)
    return State(row, row, pltpu.VMEM((grid.rows, value_dim), jnp.float32))


def column_shapes(config: AttentionConfig, grid: Grid, per_row: PerRow) -> Columns:
    """Scratch memory of the columns that the mask and the operands ask for."""
    integer, real = (pltpu.VMEM((grid.rows, LANES), dtype) for dtype in (jnp.int32, jnp.float32))
    slopes = None if per_row.alibi_slopes is None else real
    return Columns(
        None if config.mask.low(0) is None else integer,
        None if config.mask.high(0) is None and grid.padded_keys == grid.real_keys else integer,
        None if per_row.documents is None else integer,
        slopes,
        slopes,
    )


def begin(
    state: State, columns: Columns, config: AttentionConfig, grid: Grid, reach: Reach, tile: Array, per_row: PerRow
) -> None:
    """Before the first keys: a sink is where maximum and sum begin, and the columns of this tile of queries."""
    lane = lax.broadcasted_iota(jnp.int32, (grid.rows, LANES), 1)
    position = lax.broadcasted_iota(jnp.int32, (grid.group, grid.queries, LANES), 1).reshape(grid.rows, LANES)
    query = reach.start[0] + tile * grid.queries + position
    state.sums[...] = jnp.zeros(state.sums.shape, jnp.float32)
    if per_row.sinks is None:
        state.top[...] = jnp.full(state.top.shape, LEAST, jnp.float32)
        state.total[...] = jnp.zeros(state.total.shape, jnp.float32)
    else:
        sinks = _column(per_row.sinks[...]) * LOG2E
        state.top[...] = _top(sinks, config)
        state.total[...] = jnp.where(lane == 0, jnp.exp2(sinks - state.top[...]), 0.0)
    if columns.low is not None:
        columns.low[...] = config.mask.low(query) - lane
    if columns.high is not None:
        high = config.mask.high(query)
        columns.high[...] = (grid.real_keys if high is None else jnp.minimum(high, grid.real_keys)) - lane
    if columns.documents is not None:
        columns.documents[...] = _column(per_row.documents[...])
    if columns.alibi_slopes is not None:
        columns.alibi_slopes[...] = _column(per_row.alibi_slopes[...]) * LOG2E
        columns.distances[...] = (lane - query).astype(jnp.float32)


class Scales(NamedTuple):
    """Numbers in e4m3 are multiplied by: of each 128 rows of queries, and of each 256 keys and values, of a meeting.

    The same of their arrays, `batch kv_heads 1 blocks`, and of the references that a kernel gets.
    """

    q: Any
    k: Any
    v: Any


class Keys(NamedTuple):
    """Some blocks of keys that a tile of queries meets: `k[keys head_dim]`, `v[keys value_dim]`, `documents[1 keys]`,
    the index of the first of them, and `scales` where they are in e4m3."""

    k: Array
    v: Array
    documents: Array | None
    first: Array
    scales: Scales | None


def meet(state: State, columns: Columns, config: AttentionConfig, q: Array, keys: Keys, masked: int) -> None:
    """`q[rows head_dim]` takes in `keys`; of their last `masked` some pairs may be unseen."""
    groups = _scores(q, keys, config)
    if columns.alibi_slopes is not None:
        groups = [
            group + columns.alibi_slopes[...] * (columns.distances[...] + (keys.first + i * LANES).astype(jnp.float32))
            for i, group in enumerate(groups)
        ]
    for i in range(len(groups) - masked // LANES, len(groups)):
        groups[i] = _masked(groups[i], columns, keys, i * LANES)
    before = state.top[...]
    top = jnp.maximum(before, _top(jnp.max(jnp.concatenate(groups, axis=1), axis=1, keepdims=True), config))
    fading = jnp.exp2(before - top)
    powers = [jnp.exp2(group - top) for group in groups]
    state.top[...] = top
    state.total[...] = fading * state.total[...] + sum(powers[1:], powers[0])
    state.sums[...] = across(fading, state.sums.shape[1]) * state.sums[...] + _weighted(powers, keys)


def _top(scores: Array, config: AttentionConfig) -> Array:
    """The exponent below which weights are powers, where these are the greatest scores."""
    return scores if config.products is None else whole(scores)


def _scores(q: Array, keys: Keys, config: AttentionConfig) -> list[Array]:
    """Scores of each 128 keys, `rows 128`, in base 2."""
    products = matmul(q, keys.k, (1, 1))
    lanes = [slice(lane, lane + LANES) for lane in range(0, products.shape[1], LANES)]
    if keys.scales is None:
        found, _ = capped(products, config)
        return [found[:, lane] for lane in lanes]
    rows = [(slice(i * QUERIES, (i + 1) * QUERIES), of_q * factor(config)) for i, of_q in enumerate(keys.scales.q)]
    scaled = [
        jnp.concatenate([products[row, lane] * (of_q * keys.scales.k[lane.start // KEYS]) for row, of_q in rows])
        for lane in lanes
    ]
    return [bent(x, config)[0] for x in scaled]


def _weighted(powers: list[Array], keys: Keys) -> Array:
    """The sum of the values by their weights, of each 128 keys `rows 128`: `rows value_dim`."""
    weights = jnp.concatenate(powers, axis=1).astype(keys.v.dtype)
    if keys.scales is None:
        return matmul(weights, keys.v, (1, 0))
    blocks = [slice(key, key + KEYS) for key in range(0, weights.shape[1], KEYS)]
    parts = [matmul(weights[:, at], keys.v[at], (1, 0)) * by for at, by in zip(blocks, keys.scales.v, strict=True)]
    return functools.reduce(jnp.add, parts)


def _masked(scores: Array, columns: Columns, keys: Keys, lane: int) -> Array:
    """Scores of 128 keys, `rows 128`, the `lane`-th of `keys` and those after it; `MASKED` where they are not seen."""
    first, parts = keys.first + lane, []
    if columns.low is not None:
        parts.append(columns.low[...] <= first)
    if columns.high is not None:
        parts.append(columns.high[...] > first)
    if columns.documents is not None and keys.documents is not None:
        parts.append(columns.documents[...] == keys.documents[:, lane : lane + LANES])
    return scores if not parts else jnp.where(functools.reduce(jnp.logical_and, parts), scores, MASKED)


def finish(state: State) -> tuple[Array, Array]:
    """The output, `rows value_dim`, and the log-sum-exp, `1 rows`."""
    total = jnp.broadcast_to(jnp.sum(state.total[...], axis=1, keepdims=True), state.total.shape)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    lse = jnp.where(some, (state.top[...] + jnp.log2(safe)) / LOG2E, -jnp.inf)
    return state.sums[...] / across(safe, state.sums.shape[1]), lse.T[:1]


def across(column: Array, width: int) -> Array:
    """`rows 128`, the same in each lane → `rows width`."""
    return jnp.concatenate([column] * pl.cdiv(width, LANES), axis=1)[:, :width]


def _column(x: Array) -> Array:
    """`1 rows` → `rows 128`, the same in each lane."""
    return jnp.broadcast_to(x, (LANES, x.shape[1])).T
