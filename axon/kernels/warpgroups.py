"""The warpgroups of a Hopper kernel's block of threads: a producer, which copies, and two consumers, which compute."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.cost import Cost

ROWS = 64
"""Rows of a consumer warpgroup's tile: those of one `wgmma`."""

CONSUMERS = 2

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Of a thread. A launch gives each of 3 × 128 threads 168 of the 65,536, and 2 × 232 + 40 ≤ 3 × 168."""


def launch(
    name: str,
    body: Callable[..., None],
    out_type: Any,
    buffers: Any,
    grid: Mapping[str, int],
    cost: Cost,
    interpret: Any,
    *,
    approx_math: bool = False,
) -> Callable[..., Any]:
    """A kernel, to be called with its operands, of a block for each point of the named `grid`.

    Args:
        body: every warpgroup's, of the operands, the results and `buffers`.
        cost: of a call. interpret: as Pallas has it.

    Layouts are propagated as they are declared (the semantics called Lane), not inferred.
    """

    def kernel(*refs):
        body(*refs)

    kernel.__name__ = name
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=(buffers,),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=approx_math, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        **estimate(cost),
    )


def estimate(cost: Cost) -> dict[str, Any]:
    """A cost as an argument of `plgpu.kernel` that tells XLA; jax 0.11 has none, and counts no FLOPs of a kernel."""
    if jax.__version_info__ < (0, 12):
        return {}
    return {"cost_estimate": pl.CostEstimate(flops=cost.flops, bytes_accessed=cost.bytes, transcendentals=0)}


def specialise(
    consume: Callable[[Array], None], produce: Callable[[], None], registers: int = CONSUMER_REGISTERS
) -> None:
    """Each warpgroup its part; the producer gives registers to the consumers, whose threads then have so many."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(registers, action="increase")
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


def free_barriers(slots: int, consumers: int = CONSUMERS) -> Any:
    """On which the producer waits for the consumers of a slot."""
    return plgpu.Barrier(num_arrivals=consumers, num_barriers=slots)


def meeting_point() -> Any:
    """For `meet`."""
    return plgpu.Barrier(num_arrivals=CONSUMERS)
