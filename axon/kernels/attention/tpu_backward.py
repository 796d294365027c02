"""The backward TPU kernel: one pass for all three gradients, five products a pair of tiles.

With the weights P = 2^(s − lse) recomputed, dP = v·dOᵀ and D = Σ O·dO − dlse for each query (Dao, arXiv:2307.08691):

    dS = P ∘ (dP − D)    dv += P·dO    dk += dS·q    dq += dSᵀ·k

A tile of keys stays in VMEM while the tiles of queries that see it pass, so dk and dv accumulate there; so does dq, in
float32, for a span of queries, written after the last tile of keys. A sequence too long for that is
cut into spans, whose parts of dk and dv are summed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.attention.tiles import Grid, Reach
from axon.kernels.attention.tpu_forward import Operands, estimate
from axon.kernels.attention.tpu_scores import Pair, PerRow, masked, matmul, scores, sees_all, table_row
from axon.kernels.case import Cost


def backward(
    config: AttentionConfig,
    grid: Grid,
    spans: tuple[int, int],
    reach: Reach,
    operands: Operands,
    rows: tuple[Array, Array, Array],
    cost: Cost,
    vmem: int,
    interpret: Any,
) -> tuple[Array, Array, Array]:
    """Gradients of q, in its dtype, and of k and v, float32 where spans were summed.

    `spans`: how many there are, and tiles of queries in each. `rows`: dO, like q, and for each query, `batch kv_heads
    tiles 1 rows`, the log-sum-exp in base 2, infinite where no key is seen, and D.
    """
    (q, k, v), (dout, lse, total) = operands[:3], rows
    batch, kv_heads = q.shape[:2]
    at = _Places(grid, spans[1])
    summed = jnp.float32 if spans[0] > 1 else k.dtype
    of_span = (batch, kv_heads, spans[0])
    outputs = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((*of_span, *k.shape[2:]), summed),
        jax.ShapeDtypeStruct((*of_span, *v.shape[2:]), summed),
    )
    specs = (
        pl.BlockSpec((None, None, grid.group, grid.queries, q.shape[4]), at.written),
        pl.BlockSpec((None, None, None, grid.keys, k.shape[3]), lambda b, h, s, j, i, reach: (b, h, s, j, 0)),
        pl.BlockSpec((None, None, None, grid.keys, v.shape[3]), lambda b, h, s, j, i, reach: (b, h, s, j, 0)),
    )
    dq, dk, dv = pl.pallas_call(
        lambda *refs: _kernel(config, grid, spans[1], *refs),
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, spans[0], grid.key_tiles, spans[1]),
            in_specs=[at.specs(operands), at.queries(dout.shape[4]), at.row(), at.row()],
            out_specs=specs,
            scratch_shapes=[
                pltpu.VMEM((spans[1], grid.rows, q.shape[4]), jnp.float32),
                pltpu.VMEM((grid.keys, k.shape[3]), jnp.float32),
                pltpu.VMEM((grid.keys, v.shape[3]), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem
        ),
        cost_estimate=estimate(cost),
        interpret=interpret,
        name="axon_attention_backward",
    )(reach, operands, dout, lse, total)
    return dq, jnp.sum(dk, axis=2), jnp.sum(dv, axis=2)


class _Places:
    """Which tile of each array a step of the grid, `batch kv_heads spans key_tiles query_tiles`, works on."""

    def __init__(self, grid: Grid, span_tiles: int):
        self.grid, self.span_tiles = grid, span_tiles

    def query(self, b, s, j, i, reach):
        """The tile of queries; where this tile of keys is not seen by it, the nearest that is: no new fetch."""
        at = (b if reach.query_document is not None else 0) * self.grid.key_tiles + j
        first = reach.first_query[at]
        return jnp.clip(s * self.span_tiles + i, first, jnp.maximum(reach.last_query[at], first))

    def queries(self, width: int) -> pl.BlockSpec:
        shape = (None, None, self.grid.group, self.grid.queries, width)
        return pl.BlockSpec(shape, lambda b, h, s, j, i, reach: (b, h, 0, self.query(b, s, j, i, reach), 0))

    def row(self) -> pl.BlockSpec:
        shape = (None, None, None, 1, self.grid.rows)
        return pl.BlockSpec(shape, lambda b, h, s, j, i, reach: (b, h, self.query(b, s, j, i, reach), 0, 0))

    def written(self, b, h, s, j, i, reach):
        """dq's tiles go out in the pass of the last tile of keys, and the first of them waits until then."""
        return b, h, 0, s * self.span_tiles + jnp.where(j == self.grid.key_tiles - 1, i, 0), 0

    def specs(self, operands: Operands) -> Operands:
        def keys(width):
            return pl.BlockSpec((None, None, self.grid.keys, width), lambda b, h, s, j, i, reach: (b, h, j, 0))

        q, k, v, per_row, of_keys = operands
        documents = pl.BlockSpec(
            (None, None, 1, self.grid.rows), lambda b, h, s, j, i, reach: (b, self.query(b, s, j, i, reach), 0, 0)
        )
        per_head = pl.BlockSpec((None, 1, self.grid.rows), lambda b, h, s, j, i, reach: (h, 0, 0))
        return Operands(
            self.queries(q.shape[4]),
            keys(k.shape[3]),
            keys(v.shape[3]),
            PerRow(*(None if x is None else s for x, s in zip(per_row, (documents, per_head, per_head), strict=True))),
            None
            if of_keys is None
            else pl.BlockSpec((None, None, 1, self.grid.keys), lambda b, h, s, j, i, reach: (b, j, 0, 0)),
        )


def _kernel(
    config: AttentionConfig, grid: Grid, span_tiles: int, reach: Reach, x: Operands, dout, lse, total, dq, dk, dv, *sums
):
    of_q, of_k, of_v = sums
    span, j, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    table = table_row(reach)
    pair, at = Pair(table, span * span_tiles + i, j), table * grid.key_tiles + j

    @pl.when(j == 0)
    def _():
        of_q[i] = jnp.zeros(of_q.shape[1:], jnp.float32)

    @pl.when(i == 0)
    def _():
        of_k[...] = jnp.zeros(of_k.shape, jnp.float32)
        of_v[...] = jnp.zeros(of_v.shape, jnp.float32)

    def meet(partly: bool):
        q = x.q[...].reshape(grid.rows, x.q.shape[-1])
        do = dout[...].reshape(grid.rows, dout.shape[-1])
        found, slope = scores(q, x.k[...], config, grid, reach, pair, x.per_row)
        if partly:
            found = masked(found, config, grid, reach, pair, x.per_row, x.key_documents)
        weights = jnp.exp2(found - lse[...])
        dscores = weights * (matmul(x.v[...], do, (1, 1)) - total[...])
        dscores = (dscores if slope is None else dscores * slope).astype(q.dtype)
        of_v[...] += matmul(weights.astype(q.dtype), do, (1, 0))
        of_k[...] += matmul(dscores, q, (1, 0))
        of_q[i] += matmul(dscores, x.k[...], (0, 0))

    there = (reach.first_query[at] <= pair.query) & (pair.query <= reach.last_query[at])
    whole = sees_all(config, grid, reach, pair)
    pl.when(there & whole)(lambda: meet(partly=False))
    pl.when(there & jnp.logical_not(whole))(lambda: meet(partly=True))

    @pl.when(j == grid.key_tiles - 1)
    def _():
        dq[...] = (of_q[i] * config.scale).reshape(dq.shape).astype(dq.dtype)

    @pl.when(i == span_tiles - 1)
    def _():
        dk[...] = (of_k[...] * config.scale).astype(dk.dtype)
        dv[...] = of_v[...].astype(dv.dtype)
