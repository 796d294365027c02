"""A block of threads of the Hopper kernels: one producer warpgroup, two consumers, and the place that it works on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.attention.gpu_support import Sizes
from axon.kernels.attention.problem import AttentionConfig
from axon.kernels.case import Cost

ROWS = 64
"""Rows of a consumer warpgroup's tile: those of one `wgmma`."""

CONSUMERS = 2

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Of a thread. A launch gives each of 3 × 128 threads 168 of the 65,536, and 2 × 232 + 40 ≤ 3 × 168."""

FIRST, STOP, WHOLE, WHOLE_STOP, START = range(5)
"""Columns of a kernel's table: see `axon.kernels.attention.gpu_tiles.table`."""


class Place(NamedTuple):
    """Where a block works: sequence, head, tile of its rows, and the tiles that it meets, as its table says."""

    sequence: Array
    head: Array
    tile: Array
    first: Array
    stop: Array
    whole: Array
    whole_stop: Array
    start: Array

    def partly(self, at: Array) -> Array:
        """Whether the pairs with tile `at` may have to be masked."""
        return (at < self.whole) | (at >= self.whole_stop)


def place(table: Any, longest_last: bool) -> Place:
    """The place of this block. Those that take longest under a causal mask begin first."""
    sequence, tile = lax.axis_index("sequence"), lax.axis_index("tile")
    tile = table.shape[1] - 1 - tile if longest_last else tile
    row = sequence if table.shape[0] > 1 else 0
    loop = (table[row, tile, column] for column in (FIRST, STOP, WHOLE, WHOLE_STOP, START))
    return Place(sequence, lax.axis_index("head"), tile, *loop)


@dataclass(frozen=True)
class Kernel:
    """A kernel: keys from `real_keys` on are padding; `cost` is one call's; `interpret` as Pallas has it."""

    config: AttentionConfig
    sizes: Sizes
    real_keys: int
    cost: Cost
    interpret: Any

    def launch(
        self, name: str, body: Callable[..., None], out_type: Any, buffers: Any, grid: tuple[int, int, int]
    ) -> Callable[..., Any]:
        """With a block for each head, tile and sequence of `grid`; `body` is every warpgroup's.

        Layouts are propagated as they are declared (the semantics called Lane), not inferred.
        """

        def kernel(*refs):
            body(*refs)

        kernel.__name__ = f"axon_attention_{name}"
        return plgpu.kernel(
            kernel,
            out_type=out_type,
            scratch_types=(buffers,),
            grid=grid,
            grid_names=("head", "tile", "sequence"),
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
            cost_estimate=pl.CostEstimate(flops=self.cost.flops, bytes_accessed=self.cost.bytes, transcendentals=0),
            interpret=self.interpret,
        )


def specialise(consume: Callable[[Array], None], produce: Callable[[], None]) -> None:
    """Each warpgroup its part; the producer gives registers to the consumers."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consume(warpgroup)

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce()


def stream(copies: list[tuple[Any, Any]], slot: Array, full: Any, free: Any, reused: Any) -> None:
    """Copy global to shared memory, once the consumers are done with what was in the slot.

    `full` takes an arrival of each copy, `free` one of each consumer; `reused` is whether the slot was full before.
    """
    pl.when(reused)(lambda: plgpu.barrier_wait(free.at[slot]))
    for source, to in copies:
        plgpu.copy_gmem_to_smem(source, to.at[slot], full.at[slot])


def release(free: Any, interpret: Any) -> None:
    """Tell the producer that this consumer is done with a slot.

    `wgmma` reads as the copies write, and needs no fence. The interpreter's race detector knows no such reads.
    """
    if interpret:
        plgpu.commit_smem()
    plgpu.barrier_arrive(free)


def meet(barrier: Any) -> None:
    """Wait until both consumers are here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def full_barriers(copies: int, slots: int) -> Any:
    """On which consumers wait for copies."""
    return plgpu.Barrier(num_arrivals=copies, num_barriers=slots)


def free_barriers(slots: int) -> Any:
    """On which the producer waits for the consumers."""
    return plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=slots)


def meeting_point() -> Any:
    """For `meet`."""
    return plgpu.Barrier(num_arrivals=CONSUMERS)


def array(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """A result of a kernel."""
    return jax.ShapeDtypeStruct(shape, dtype)
