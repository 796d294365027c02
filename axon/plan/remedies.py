"""Settings of a run by which its training would take less memory."""

from collections.abc import Iterator
from dataclasses import replace

import jax

from axon.axes.execution import policies
from axon.nn.remat import keeps_more
from axon.plan.memory import gib, least_memory
from axon.plan.slots import reserved
from axon.train.optimizers import is_by_layer
from axon.train.step import Program

SPLIT = {
    1: "the optimizer's state",
    2: "gradients and the optimizer's state",
    3: "parameters, gradients and the optimizer's state",
}
"""ZeRO's stage → what it splits."""

LESS_KEPT = ("minimal", "full")
"""Policies by name, each of which keeps less than the one before."""

WORTHWHILE = 2**30 // 100
"""Bytes a device that a stage has to save to be worth a line."""


def remedies(program: Program, times: float = 2, short: float | None = None) -> list[str]:
    """Fields to set, a line each; those that change no loss first.

    Args:
        times: by how much activations are to shrink. short: bytes that are missing on each device, if that is known.
    """
    changes = f"a smaller Data.batch, Data.seq or model, which train differently; or {more(program)}"
    return [*microbatches(program, times), *remat(program, short), *zero(program), *host(program), changes]


def more(program: Program) -> str:
    """What else has more memory."""
    return "a machine with more memory" if program.placement.platform == "cpu" else "more devices"


def microbatches(program: Program, times: float = 2) -> Iterator[str]:
    """So many more microbatches, as far as a device has several sequences in each."""
    now = program.placement.layout.microbatches
    sequences = program.batch // program.placement.num_shards("batch") // now
    if sequences > 1:
        parts = next(n for n in range(2, sequences + 1) if sequences % n == 0 and n >= min(times, sequences))
        yield (
            f"Layout.microbatches = {now * parts} ({now} now): activations of {sequences // parts} of a device's "
            f"{sequences * now} sequences at a time, not of {sequences}"
        )


def remat(program: Program, short: float | None = None) -> Iterator[str]:
    """The policies that keep less than the one in force: full rematerialisation, and on stages others between."""
    now, pipeline = program.runtime.execution.remat, program.evaluator.pipeline
    if not any(map(keeps_more, policies(now))):
        return
    if pipeline is not None and pipeline.table.flush:
        yield from _of_slots(program, short)
        return
    yield (
        f"Execution.remat = 'full' ({now!r} now): of each block only its input is kept for the backward, which "
        "computes the rest again"
    )


def _of_slots(program: Program, short: float | None) -> Iterator[str]:
    """Each named policy under which less waits on a pipeline's stages, and whether that is enough."""
    now = program.runtime.execution.remat
    taken = least = reserved(program)
    for policy in LESS_KEPT:
        if least - (other := reserved(program, policy)) < WORTHWHILE:
            continue
        least = other
        fits = "" if short is None else ", which fits" if taken - other >= short else ", which is not enough by itself"
        yield (
            f"Execution.remat = {policy!r} ({now!r} now): what waits on each stage for its backwards takes "
            f"{gib(other)} GiB, not {gib(taken)}{fits}"
        )


def zero(program: Program) -> Iterator[str]:
    """Each stage of ZeRO that would take less than those before it."""
    placement = program.placement
    layout = placement.layout
    least = now = sum(least_memory(program).values())
    for stage in range(layout.zero + 1, 4):
        other = sum(least_memory(program, replace(placement, layout=replace(layout, zero=stage))).values())
        if least - other >= WORTHWHILE:
            least = other
            yield (
                f"Layout.zero = {stage} ({layout.zero} now): {gib(now - other)} GiB less on each device, with "
                f"{SPLIT[stage]} split over the {placement.mesh.shape['data']} devices along 'data'"
            )


def host(program: Program) -> Iterator[str]:
    """The optimizer's state in the host's memory, where that is another's and the optimizer allows for it."""
    placement = program.placement
    streams = is_by_layer(program.optimizer) and placement.has_host_memory and placement.platform != "cpu"
    if placement.host or placement.disk or not streams or placement.mesh_axes("layers", "optimizer"):
        return
    state = sum(map(placement.bytes_per_device, jax.tree.leaves(program.specs.optimizer)))
    if state >= WORTHWHILE:
        yield (
            f"Execution.host = ('optimizer',): {gib(state)} GiB less on each device, whose optimizer state is then in "
            "the host's memory, and fetched one layer at a time in each step"
        )
