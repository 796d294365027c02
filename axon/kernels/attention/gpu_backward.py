"""The backward Hopper kernels: one for the gradient of the queries, one for those of keys and values.

Of a query's log-sum-exp L and its D = Σ out·dout − dlse (Dao, arXiv:2307.08691), with P = exp(scale·q·kᵀ − L):

    dS = P·(dO·vᵀ − D)    dq = scale·dS·k    dk = scale·dSᵀ·q    dv = Pᵀ·dO

Each gradient is summed in the registers of one warpgroup, in one order: the results are the same in every run, for
which q·kᵀ and dO·vᵀ are computed twice.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.attention.gpu_block import Kernel, Place, array, place
from axon.kernels.attention.gpu_scores import Axis, documents_of, masked
from axon.kernels.attention.gpu_tiles import Operands
from axon.kernels.warpgroups import CONSUMERS, ROWS, free_barriers, full_barriers, release, specialise, stream
from axon.kernels.wgmma import ROW, along_rows, multiply, multiply_into, opaque, shared, zeros
from axon.kernels.wgmma_softmax import LOG2E


class Rows(NamedTuple):
    """Of each query: `dout[batch seq heads value_dim]`, and L in base 2, ∞ for none, and D, `batch heads seq`."""

    dout: Any
    lse: Any
    total: Any


class _Buffers(NamedTuple):
    """Shared memory of a block, and the barriers on which its warpgroups meet."""

    q: Any
    dout: Any
    k: Any
    v: Any
    q_full: Any
    full: Any
    free: Any


class QueryGradients(Kernel):
    """A block has 128 queries of a head, and meets the tiles of keys that they see."""

    def run(self, table: Array, operands: Operands, rows: Rows) -> Array:
        """dq, `batch seq heads head_dim`."""
        batch, length, heads, width = operands.q.shape
        out_type = array(batch, length, heads, width, dtype=operands.q.dtype)
        grid = (heads, length // (CONSUMERS * ROWS), batch)
        return self.launch("dq", self.block, out_type, self.buffers(operands), grid)(table, operands, rows)

    def buffers(self, operands: Operands) -> _Buffers:
        (tile, stages), dtype = self.sizes, operands.q.dtype
        width, value = operands.q.shape[3], operands.v.shape[3]
        return _Buffers(
            shared(CONSUMERS, ROWS, width, dtype=dtype),
            shared(CONSUMERS, ROWS, value, dtype=dtype),
            shared(stages, tile, width, dtype=dtype),
            shared(stages, tile, value, dtype=dtype),
            full_barriers(2, CONSUMERS),
            full_barriers(2, stages),
            free_barriers(stages),
        )

    def block(self, table, operands, rows, dq, x):
        here = place(table, longest_last=True)
        specialise(
            lambda consumer: self.consume(consumer, here, operands, rows, dq, x),
            lambda: self.produce(here, operands, x),
        )

    def produce(self, here: Place, operands, x):
        """Copy the tiles of keys and values, as shared memory becomes free."""
        tile, stages = self.sizes
        kv_head = lax.div(here.head, jnp.int32(operands.q.shape[2] // operands.k.shape[2]))

        @pl.loop(here.first, here.stop)
        def _(at):
            slot, reused = lax.rem(at - here.first, jnp.int32(stages)), at >= here.first + stages
            keys = (here.sequence, pl.ds(at * tile, tile), kv_head)
            stream([(operands.k.at[keys], x.k), (operands.v.at[keys], x.v)], slot, x.full, x.free, reused)

    def consume(self, consumer, here: Place, operands, rows, dq, x):
        """The gradient of 64 queries."""
        row = (here.tile * CONSUMERS + consumer) * ROWS
        mine = (here.sequence, pl.ds(row, ROWS), here.head)
        q, dout, full = (one.at[consumer] for one in (x.q, x.dout, x.q_full))
        plgpu.copy_gmem_to_smem(operands.q.at[mine], q, full)
        plgpu.copy_gmem_to_smem(rows.dout.at[mine], dout, full)
        lse, total = (
            plgpu.load(one.at[here.sequence, here.head, pl.ds(row, ROWS)], layout=ROW, optimized=False)
            for one in rows[1:]
        )
        plgpu.barrier_wait(full)
        queries = Axis(here.start + row, ROWS, documents_of(operands, 0, here.sequence, row, ROWS))
        sums = lax.fori_loop(
            here.first,
            here.stop,
            lambda at, sums: self.step(at, sums, consumer, (lse, total), queries, here, operands, x),
            zeros(ROWS, dq.shape[3]),
        )
        q[...] = (sums * self.config.scale).astype(dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, dq.at[mine])
        plgpu.wait_smem_to_gmem(0)

    def step(self, at, sums, consumer, of_rows, queries, here: Place, operands, x):
        """Meet one tile of keys."""
        (lse, total), (tile, stages) = of_rows, self.sizes
        consumer, slot = opaque(consumer), opaque(lax.rem(at - here.first, jnp.int32(stages)))
        plgpu.barrier_wait(x.full.at[slot])
        scores = multiply(x.q.at[consumer], x.k.at[slot])
        keys = Axis(at * tile, tile, documents_of(operands, 1, here.sequence, at * tile, tile))
        scores = masked(here.partly(at), scores, self.config.mask, self.real_keys, queries, keys)
        weights = jnp.exp2(scores * (self.config.scale * LOG2E) - along_rows(lse, tile))
        dscores = weights * (multiply(x.dout.at[consumer], x.v.at[slot]) - along_rows(total, tile))
        sums = multiply_into(sums, dscores.astype(operands.k.dtype), x.k.at[slot], self.interpret)
        release(x.free.at[slot], self.interpret)
        return sums
