"""The forward TPU kernel: a tile of queries meets the tiles of keys that it sees, one after the other.

For each query the running maximum m, the running sum ℓ of the powers and the running output O (Milakov & Gimelshein,
arXiv:1805.02867; Dao et al., arXiv:2205.14135):

    m′ = max(m, max s)    ℓ′ = 2^(m−m′)·ℓ + Σ 2^(s−m′)    O′ = 2^(m−m′)·O + Σ 2^(s−m′)·v

and at the end O/ℓ, and the log-sum-exp m + log ℓ.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.attention.tiles import Grid, Reach
from axon.kernels.attention.tpu_scores import (
    LEAST,
    LOG2E,
    Pair,
    PerRow,
    masked,
    matmul,
    scores,
    sees_all,
    table_row,
)
from axon.kernels.case import Cost


class Operands(NamedTuple):
    """`q[batch kv_heads group seq head_dim]`, `k, v[batch kv_heads kv_seq head_dim]`, and the numbers of their rows.

    The same of their blocks' specifications, and of the references that a kernel gets.
    """

    q: Any
    k: Any
    v: Any
    per_row: PerRow
    key_documents: Any


def forward(
    config: AttentionConfig,
    grid: Grid,
    steps: int,
    reach: Reach,
    operands: Operands,
    cost: Cost,
    vmem: int,
    interpret: Any,
) -> tuple[Array, Array]:
    """The output, `batch kv_heads group seq head_dim`, and each query's log-sum-exp, `batch kv_heads tiles 1 rows`."""
    q, v = operands.q, operands.v
    batch, kv_heads, group, length, _ = q.shape
    out = jax.ShapeDtypeStruct((batch, kv_heads, group, length, v.shape[3]), q.dtype)
    lse = jax.ShapeDtypeStruct((batch, kv_heads, grid.query_tiles, 1, grid.rows), jnp.float32)
    tile = pl.BlockSpec((None, None, group, grid.queries, v.shape[3]), lambda b, h, i, t, reach: (b, h, 0, i, 0))
    rows = pl.BlockSpec((None, None, None, 1, grid.rows), lambda b, h, i, t, reach: (b, h, i, 0, 0))
    return pl.pallas_call(
        lambda *refs: _kernel(config, grid, steps, *refs),
        out_shape=(out, lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, grid.query_tiles, steps),
            in_specs=[_specs(grid, operands)],
            out_specs=(tile, rows),
            scratch_shapes=[
                pltpu.VMEM((1, grid.rows), jnp.float32),
                pltpu.VMEM((1, grid.rows), jnp.float32),
                pltpu.VMEM((v.shape[3], grid.rows), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
        cost_estimate=estimate(cost),
        interpret=interpret,
        name="axon_attention_forward",
    )(reach, operands)


def estimate(cost: Cost) -> pl.CostEstimate:
    """A kernel's cost as XLA's scheduler, and a count of a program's FLOPs, read it."""
    return pl.CostEstimate(flops=cost.flops, bytes_accessed=cost.bytes, transcendentals=0)


def _specs(grid: Grid, operands: Operands) -> Operands:
    """The tile of each operand that a step works on."""

    def key(b, i, t, reach):
        at = (b if reach.query_document is not None else 0) * grid.query_tiles + i
        return jnp.minimum(reach.first[at] + t, jnp.maximum(reach.last[at], reach.first[at]))

    def keys(width):
        return pl.BlockSpec((None, None, grid.keys, width), lambda b, h, i, t, reach: (b, h, key(b, i, t, reach), 0))

    documents = pl.BlockSpec((None, None, 1, grid.rows), lambda b, h, i, t, reach: (b, i, 0, 0))
    per_head = pl.BlockSpec((None, 1, grid.rows), lambda b, h, i, t, reach: (h, 0, 0))
    key_documents = pl.BlockSpec((None, None, 1, grid.keys), lambda b, h, i, t, reach: (b, key(b, i, t, reach), 0, 0))
    q, k, v, per_row, of_keys = operands
    return Operands(
        pl.BlockSpec((None, None, grid.group, grid.queries, q.shape[4]), lambda b, h, i, t, reach: (b, h, 0, i, 0)),
        keys(k.shape[3]),
        keys(v.shape[3]),
        PerRow(*(None if x is None else s for x, s in zip(per_row, (documents, per_head, per_head), strict=True))),
        None if of_keys is None else key_documents,
    )


def _kernel(config: AttentionConfig, grid: Grid, steps: int, reach: Reach, x: Operands, out, lse, top, total, sums):
    table, i, t = table_row(reach), pl.program_id(2), pl.program_id(3)
    at = table * grid.query_tiles + i
    pair = Pair(table, i, reach.first[at] + t)

    @pl.when(t == 0)
    def _():
        sinks = x.per_row.sinks
        top[...] = jnp.full(top.shape, LEAST, jnp.float32) if sinks is None else sinks[...] * LOG2E
        total[...] = jnp.full(total.shape, 0.0 if sinks is None else 1.0, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    def meet(partly: bool):
        q = x.q[...].reshape(grid.rows, x.q.shape[-1])
        found, _ = scores(q, x.k[...], config, grid, reach, pair, x.per_row)
        if partly:
            found = masked(found, config, grid, reach, pair, x.per_row, x.key_documents)
        peak = jnp.maximum(top[...], jnp.max(found, axis=0, keepdims=True))
        fading = jnp.exp2(top[...] - peak)
        powers = jnp.exp2(found - peak)
        total[...] = fading * total[...] + jnp.sum(powers, axis=0, keepdims=True)
        sums[...] = fading * sums[...] + matmul(x.v[...], powers.astype(x.v.dtype), (0, 0))
        top[...] = peak

    there = pair.key <= reach.last[at]
    whole = sees_all(config, grid, reach, pair)
    pl.when(there & whole)(lambda: meet(partly=False))
    pl.when(there & jnp.logical_not(whole))(lambda: meet(partly=True))

    @pl.when(t == steps - 1)
    def _():
        some = total[...] > 0
        safe = jnp.where(some, total[...], 1.0)
        out[...] = (sums[...] / safe).T.reshape(out.shape).astype(out.dtype)
        lse[...] = jnp.where(some, (top[...] + jnp.log2(safe)) / LOG2E, -jnp.inf)
