"""The forward Hopper kernel (FlashAttention-3, Shah et al., arXiv:2407.08608).

One block of threads for 128 queries of a head: a producer warpgroup copies tiles of keys and values to shared memory
by TMA; each of two consumer warpgroups has 64 queries, whose output stays in its registers. The consumers take turns:
while one multiplies on the tensor cores the other computes its softmax. The recurrence is that of the TPU kernel.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.attention.gpu_block import Kernel, array, place
from axon.kernels.attention.gpu_scores import Axis, documents_of, masked
from axon.kernels.attention.gpu_tiles import Operands
from axon.kernels.warpgroups import (
    CONSUMERS,
    ROWS,
    free_barriers,
    full_barriers,
    meet,
    meeting_point,
    release,
    specialise,
    stream,
)
from axon.kernels.wgmma import multiply, multiply_into, shared
from axon.kernels.wgmma_softmax import LOG2E, Running


class _Buffers(NamedTuple):
    """Shared memory of a block, and the barriers on which its warpgroups meet. Queries and output share theirs."""

    q_or_out: Any
    k: Any
    v: Any
    lse: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    turn: Any


class Forward(Kernel):
    """A block has 128 queries of a head, and meets the tiles of keys that they see."""

    def run(self, table: Array, operands: Operands) -> tuple[Array, Array]:
        """The output, `batch seq heads value_dim`, and each query's log-sum-exp, `batch heads seq`."""
        (batch, length, heads, _), value = operands.q.shape, operands.v.shape[3]
        out_type = (
            array(batch, length, heads, value, dtype=operands.q.dtype),
            array(batch, heads, length, dtype=jnp.float32),
        )
        grid = (heads, length // (CONSUMERS * ROWS), batch)
        return self.launch("forward", self.block, out_type, self.buffers(operands), grid)(table, operands)

    def buffers(self, operands: Operands) -> _Buffers:
        (tile, stages), dtype = self.sizes, operands.q.dtype
        width, value = operands.q.shape[3], operands.v.shape[3]
        return _Buffers(
            plgpu.RefUnion(
                shared(CONSUMERS, ROWS, width, dtype=dtype),
                shared(CONSUMERS, ROWS * width // value, value, dtype=dtype),
            ),
            shared(stages, tile, width, dtype=dtype),
            shared(stages, tile, value, dtype=dtype),
            plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            full_barriers(1, CONSUMERS),
            full_barriers(1, stages),
            full_barriers(1, stages),
            free_barriers(stages),
            free_barriers(stages),
            meeting_point(),
        )

    def block(self, table, operands, out, lse, buffers):
        here = place(table, longest_last=True)
        specialise(
            lambda consumer: self.consume(consumer, here, operands, out, lse, buffers),
            lambda: self.produce(here, operands, buffers),
        )

    def produce(self, here, operands, x):
        """Copy the tiles of keys and values, as shared memory becomes free."""
        tile, stages = self.sizes
        kv_head = lax.div(here.head, jnp.int32(operands.q.shape[2] // operands.k.shape[2]))

        @pl.loop(here.first, here.stop)
        def _(at):
            slot, reused = lax.rem(at - here.first, jnp.int32(stages)), at >= here.first + stages
            keys = (here.sequence, pl.ds(at * tile, tile), kv_head)
            stream([(operands.k.at[keys], x.k)], slot, x.k_full, x.k_free, reused)
            stream([(operands.v.at[keys], x.v)], slot, x.v_full, x.v_free, reused)

    def consume(self, consumer, here, operands, out, lse, x):
        """Attend with 64 queries, and write their output."""
        row = (here.tile * CONSUMERS + consumer) * ROWS
        rows = (here.sequence, pl.ds(row, ROWS), here.head)
        q, result = (one.at[consumer] for one in x.q_or_out)
        plgpu.copy_gmem_to_smem(operands.q.at[rows], q, x.q_full.at[consumer])
        plgpu.barrier_wait(x.q_full.at[consumer])
        queries = Axis(here.start + row, ROWS, documents_of(operands, 0, here.sequence, row, ROWS))
        pl.when(consumer == 1)(lambda: meet(x.turn))
        running = lax.fori_loop(
            here.first,
            here.stop,
            lambda at, running: self.step(at, running, q, queries, here, operands, x),
            Running.begin(ROWS, out.shape[3]),
        )
        pl.when(consumer == 0)(lambda: meet(x.turn))
        result, of_rows = result.at[pl.ds(0, ROWS)], x.lse.at[consumer]
        found, of_rows[...] = running.finish(-jnp.inf)
        result[...] = found.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, out.at[rows])
        plgpu.copy_smem_to_gmem(of_rows, lse.at[here.sequence, here.head, pl.ds(row, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    def step(self, at, running, q, queries, here, operands, x):
        """Meet one tile of keys."""
        tile, stages = self.sizes
        slot = lax.rem(at - here.first, jnp.int32(stages))
        plgpu.barrier_wait(x.k_full.at[slot])
        scores = multiply(q, x.k.at[slot], lambda: meet(x.turn))
        release(x.k_free.at[slot], self.interpret)
        keys = Axis(at * tile, tile, documents_of(operands, 1, here.sequence, at * tile, tile))
        scores = masked(here.partly(at), scores, self.config.mask, self.real_keys, queries, keys)
        running, weights = running.meet(scores, self.config.scale * LOG2E)
        weights = weights.astype(operands.v.dtype)
        plgpu.barrier_wait(x.v_full.at[slot])
        meet(x.turn)
        sums = multiply_into(running.sums, weights, x.v.at[slot], self.interpret)
        release(x.v_free.at[slot], self.interpret)
        return running._replace(sums=sums)
