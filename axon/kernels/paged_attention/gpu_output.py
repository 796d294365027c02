"""The results of the Hopper kernel's consumers: merged where both have the same rows, and written to global memory."""

from dataclasses import dataclass
from typing import Any

from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.paged_attention.gpu_memory import Buffers, Found
from axon.kernels.paged_attention.gpu_work import Place, Shape
from axon.kernels.warpgroups import ROWS, meet
from axon.kernels.wgmma import ROW, TILE
from axon.kernels.wgmma_softmax import LEAST, Running


@dataclass(frozen=True)
class Output:
    """Where the results of a consumer go.

    Args:
        first, stored: of the block's rows, the consumer's first, and how many of its 64 there are in global memory.
        results: the output, `blocks kv_heads rows head_dim`; where pages are split, `splits …`, and the log-sum-exps.
    """

    shape: Shape
    here: Place
    consumer: Array
    first: Array
    stored: int
    results: list[Any]
    x: Buffers

    def finish(self, running: Running) -> None:
        """Write what the consumer, or what both, have found."""
        if self.shape.alternating:
            self._merge(running)
        else:
            if self.shape.splits > 1:
                meet(self.x.done)
            self._write(running)

    def _merge(self, running: Running) -> None:
        """The first consumer writes what both have found."""
        done, theirs = self.x.done, Found(*(one.at[1] for one in self.x.rings_or_found[1]))
        meet(done)  # no tile is in use any more, nor in flight

        @pl.when(self.consumer == 1)
        def _():
            theirs.sums[...], theirs.top[...], theirs.total[...] = running.sums, running.top, running.total
            plgpu.barrier_arrive(done)

        @pl.when(self.consumer == 0)
        def _():
            meet(done)
            top, total = (plgpu.load(one, layout=ROW) for one in (theirs.top, theirs.total))
            self._write(running.merge(Running(top, total, plgpu.load(theirs.sums, layout=TILE))))

    def _write(self, running: Running) -> None:
        out, lse = running.finish(LEAST)
        here, rows, found = self.here, pl.ds(self.first, self.stored), self.x.rings_or_found[1]
        if self.shape.splits == 1:
            buffer, to = self.x.q_or_out.at[self.consumer], self.results[0].at[here.block, here.head, rows]
        else:
            part = here.split, here.block, here.head
            buffer, to = found.sums.at[self.consumer], self.results[0].at[*part, rows]
            of_rows, to_rows = found.top.at[self.consumer], self.results[1].at[*part, pl.ds(self.first, ROWS)]
            of_rows[...] = lse
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(of_rows, to_rows)
        buffer[...] = out.astype(self.results[0].dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, self.stored)], to)
        plgpu.wait_smem_to_gmem(0)
