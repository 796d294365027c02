"""The Hopper kernel for the gradients of keys and values: see `axon.kernels.attention.gpu_backward`.

Scores are transposed, `keys queries`, so that weights are operands from registers, as they are computed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.attention.gpu_backward import Rows
from axon.kernels.attention.gpu_block import Kernel, Place, array, place
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
from axon.kernels.wgmma import COLUMN, along_columns, multiply, multiply_into, opaque, shared, zeros
from axon.kernels.wgmma_softmax import LOG2E


class _Buffers(NamedTuple):
    """Shared memory of a block, and the barriers on which its warpgroups meet."""

    k: Any
    v: Any
    q: Any
    dout: Any
    lse: Any
    total: Any
    keys_full: Any
    full: Any
    free: Any
    done: Any


def block_keys(width: int, value: int) -> int:
    """Keys of a block: 64 of each consumer where registers hold both gradients, else 64, of which each has one."""
    return ROWS * CONSUMERS if width + value <= 256 else ROWS


@dataclass(frozen=True)
class KeyGradients(Kernel):
    """A block has `keys` keys of a head, and meets the tiles of queries that see them, of each head of the group."""

    keys: int

    def run(self, table: Array, operands: Operands, rows: Rows) -> tuple[Array, Array]:
        """dk, `batch kv_seq kv_heads head_dim`, and dv, `batch kv_seq kv_heads value_dim`."""
        batch, length, kv_heads, width = operands.k.shape
        widths = width, operands.v.shape[3]
        out_type = tuple(array(batch, length, kv_heads, size, dtype=operands.k.dtype) for size in widths)
        grid = (kv_heads, length // self.keys, batch)
        return self.launch("dkv", self.block, out_type, self.buffers(operands), grid)(table, operands, rows)

    def buffers(self, operands: Operands) -> _Buffers:
        (tile, stages), dtype = self.sizes, operands.q.dtype
        width, value = operands.q.shape[3], operands.v.shape[3]
        parts = self.keys // ROWS
        return _Buffers(
            shared(parts, ROWS, width, dtype=dtype),
            shared(parts, ROWS, value, dtype=dtype),
            shared(stages, tile, width, dtype=dtype),
            shared(stages, tile, value, dtype=dtype),
            plgpu.SMEM((stages, tile), jnp.float32),
            plgpu.SMEM((stages, tile), jnp.float32),
            full_barriers(2, CONSUMERS),
            full_barriers(4, stages),
            free_barriers(stages),
            meeting_point(),
        )

    def block(self, table, operands, rows, dk, dv, x):
        here = place(table, longest_last=False)
        group = operands.q.shape[2] // operands.k.shape[2]
        specialise(
            lambda consumer: self.consume(consumer, here, group, operands, dk, dv, x),
            lambda: self.produce(here, group, operands, rows, x),
        )

    def produce(self, here: Place, group: int, operands, rows, x):
        """Copy the tiles of queries, head by head, as shared memory becomes free."""
        tile, stages = self.sizes
        tiles = here.stop - here.first

        @pl.loop(0, group * tiles)
        def _(step):
            at, head = here.first + lax.rem(step, tiles), here.head * group + lax.div(step, tiles)
            queries = pl.ds(at * tile, tile)
            copies = [
                (operands.q.at[here.sequence, queries, head], x.q),
                (rows.dout.at[here.sequence, queries, head], x.dout),
                (rows.lse.at[here.sequence, head, queries], x.lse),
                (rows.total.at[here.sequence, head, queries], x.total),
            ]
            stream(copies, lax.rem(step, jnp.int32(stages)), x.full, x.free, step >= stages)

    def consume(self, consumer, here: Place, group: int, operands, dk, dv, x):
        """The gradients of 64 keys, both or one."""
        part = consumer if self.keys > ROWS else jnp.int32(0)
        row = here.tile * self.keys + part * ROWS
        mine = (here.sequence, pl.ds(row, ROWS), here.head)
        k, v = x.k.at[part], x.v.at[part]

        @pl.when(consumer < self.keys // ROWS)
        def _():
            plgpu.copy_gmem_to_smem(operands.k.at[mine], k, x.keys_full.at[part])
            plgpu.copy_gmem_to_smem(operands.v.at[mine], v, x.keys_full.at[part])

        plgpu.barrier_wait(x.keys_full.at[part])
        keys = Axis(row, ROWS, documents_of(operands, 1, here.sequence, row, ROWS))
        gather = _Gather(self, here, group, keys, part, mine, operands, x)
        if self.keys > ROWS:
            gather.run({"k": dk, "v": dv})
        else:
            pl.when(consumer == 0)(lambda: gather.run({"v": dv}))
            pl.when(consumer == 1)(lambda: gather.run({"k": dk}))


class _Gather(NamedTuple):
    """One consumer's loop over the tiles of queries."""

    kernel: KeyGradients
    here: Place
    group: int
    keys: Axis
    part: Array
    mine: Any
    operands: Operands
    x: _Buffers

    def run(self, results: dict[str, Any]) -> None:
        """Sum the gradients that are named, and write them over the keys and values."""
        tiles = self.here.stop - self.here.first
        sums = {name: zeros(ROWS, result.shape[3]) for name, result in results.items()}
        sums = lax.fori_loop(0, self.group * tiles, self.step, sums)
        meet(self.x.done)
        for name, result in results.items():
            scale, buffer = (self.kernel.config.scale, self.x.k) if name == "k" else (1.0, self.x.v)
            buffer = buffer.at[self.part]
            buffer[...] = (sums[name] * scale).astype(result.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, result.at[self.mine])
        plgpu.wait_smem_to_gmem(0)

    def step(self, step, sums):
        """Meet one tile of queries of one head."""
        here, x, sums = self.here, self.x, dict(sums)
        config, (tile, stages) = self.kernel.config, self.kernel.sizes
        at, slot = here.first + lax.rem(step, here.stop - here.first), lax.rem(step, jnp.int32(stages))
        part = opaque(self.part)
        plgpu.barrier_wait(x.full.at[slot])
        scores = multiply(x.k.at[part], x.q.at[slot])
        queries = Axis(here.start + at * tile, tile, documents_of(self.operands, 0, here.sequence, at * tile, tile))
        scores = masked(here.partly(at), scores, config.mask, self.kernel.real_keys, queries, self.keys, 1)
        lse = plgpu.load(x.lse.at[slot], layout=COLUMN)
        weights = jnp.exp2(scores * (config.scale * LOG2E) - along_columns(lse, ROWS))
        dtype, interpret = self.operands.q.dtype, self.kernel.interpret
        if "v" in sums:
            sums["v"] = multiply_into(sums["v"], weights.astype(dtype), x.dout.at[slot], interpret)
        if "k" in sums:
            dweights = multiply(x.v.at[part], x.dout.at[slot])
            # D is loaded after the product: before it, its registers would be taken while that runs, and others spill.
            dscores = weights * (dweights - along_columns(plgpu.load(x.total.at[slot], layout=COLUMN), ROWS))
            sums["k"] = multiply_into(sums["k"], dscores.astype(dtype), x.q.at[slot], interpret)
        release(x.free.at[slot], interpret)
        return sums
