"""The work of both Hopper kernels: blocks that stay and take unit after unit, sums in registers, results in chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.grouped_matmul.gpu_support import Sizes
from axon.kernels.warpgroups import CONSUMERS, ROWS, free_barriers, full_barriers, release, specialise, stream
from axon.kernels.wgmma import shared

DEPTH = 64
"""What a step contracts over: as many 16-bit elements as a swizzle of 128 bytes has."""

SWIZZLE = 128
"""Bytes of a row of a chunk of the result, in shared memory."""

STAGED = 2
"""Chunks of a consumer's result that are on their way to global memory at a time."""


class Buffers(NamedTuple):
    """Shared memory of a block: tiles of both operands in flight, and chunks of each consumer's result; barriers."""

    left: Any
    right: Any
    staged: Any
    full: Any
    free: Any


@dataclass(frozen=True)
class Kernel:
    """A kernel of so many `blocks`, which take the units of work in turn; `interpret` as Pallas has it."""

    sizes: Sizes
    blocks: int
    interpret: Any

    def buffers(self, left: tuple[int, int], right: tuple[int, int], dtype: Any, result: Any) -> Buffers:
        """Of tiles of these shapes, and of results in the dtype `result`."""
        gpu: Any = plgpu  # whose transforms' types are abstract, and do work
        stages, swizzle = self.sizes.stages, gpu.SwizzleTransform(SWIZZLE)
        return Buffers(
            shared(stages, *left, dtype=dtype),
            shared(stages, *right, dtype=dtype),
            gpu.SMEM((CONSUMERS, STAGED, ROWS, SWIZZLE // jnp.dtype(result).itemsize), result, transforms=(swizzle,)),
            full_barriers(2, stages),
            free_barriers(stages),
        )

    def work(self, count: Array, produce: Callable[[Array, Array], Array], consume: Callable[..., Array]) -> None:
        """All units: `produce(unit, done)` and `consume(consumer, unit, done)` → how many steps are done after it."""
        first = lax.axis_index("block")
        mine = lax.div(count - first + (self.blocks - 1), jnp.int32(self.blocks))

        def each(unit: Callable[[Array, Array], Array]) -> None:
            lax.fori_loop(0, mine, lambda i, done: unit(first + i * self.blocks, done), jnp.int32(0))

        def consume_all(consumer: Array) -> None:
            each(lambda at, done: consume(consumer, at, done))
            plgpu.wait_smem_to_gmem(0)

        specialise(consume_all, lambda: each(produce))

    def slot(self, done: Array) -> Array:
        """Which of the tiles in shared memory a step uses, after so many steps."""
        return lax.rem(done, jnp.int32(self.sizes.stages))

    def copy(self, left: Any, right: Any, done: Array, x: Buffers) -> None:
        """Copy a step's tiles, once shared memory is free."""
        stream([(left, x.left), (right, x.right)], self.slot(done), x.full, x.free, done >= self.sizes.stages)

    def sums(self, done: Array, steps: Array, operands: Callable[[Array, Array], tuple[Any, Any]], x: Buffers) -> Array:
        """The sum of so many products in float32, of 64 rows; the tensor cores have the next one while one runs.

        `operands(step, slot)` are those of a step, in shared memory.
        """

        def free(step):
            release(x.free.at[self.slot(done + step)], self.interpret)

        def multiply(total):
            def step(at, _):
                slot = self.slot(done + at)
                plgpu.barrier_wait(x.full.at[slot])
                plgpu.wgmma(total, *operands(at, slot))
                plgpu.wgmma_wait(1)
                pl.when(at > 0)(lambda: free(at - 1))

            lax.fori_loop(0, steps, step, None)
            return total[...]

        total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, self.sizes.columns), jnp.float32))
        pl.when(steps > 0)(lambda: free(steps - 1))
        return total

    def skip(self, done: Array, steps: Array, x: Buffers) -> None:
        """Let so many tiles pass that a consumer does not need."""

        @pl.loop(0, steps)
        def _(step):
            slot = self.slot(done + step)
            plgpu.barrier_wait(x.full.at[slot])
            release(x.free.at[slot], self.interpret)


def store(total: Array, staged: Any, copy: Callable[[Any, pl.Slice], None]) -> None:
    """Write a result of 64 rows by way of `staged`, this consumer's shared memory.

    `copy(chunk, columns)` copies what it will of a chunk of the result, as it lies in shared memory.
    """
    width = staged.shape[2]
    for at in range(total.shape[1] // width):
        if at % STAGED == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        chunk = staged.at[at % STAGED]
        chunk[...] = total[:, at * width : (at + 1) * width].astype(chunk.dtype)
        plgpu.commit_smem()
        copy(chunk, pl.ds(at * width, width))
