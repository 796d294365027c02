"""Settings of a run by which its training would take less memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from axon.axes.execution import policies
from axon.nn.remat import keeps_more
from axon.parallel.pipeline.rows import rows
from axon.plan.memory import gib, least_memory
from axon.plan.policies import names_by_module, offloads_of, policies_of
from axon.plan.slots import slot_sizes, stages_of
from axon.train.optimizers import is_by_layer
from axon.train.step import Program

SPLIT = {
    1: "the optimizer's state",
    2: "gradients and the optimizer's state",
    3: "parameters, gradients and the optimizer's state",
}
"""ZeRO's stage → what it splits."""

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
    if pipeline is not None and pipeline.table.flush:
        yield from _of_slots(program, short)
        return
    if not any(map(keeps_more, policies(now))):
        return
    yield (
        f"Execution.remat = 'full' ({now!r} now): of each block only its input is kept for the backward, which "
        "computes the rest again"
    )


def _of_slots(program: Program, short: float | None) -> Iterator[str]:
    """The policies under which less waits on a pipeline's stages, and likewise of those that send to the host, each
    with what it is of every stage, and whether that is enough."""
    now, table = program.runtime.execution.remat, stages_of(program).table
    pools = rows(table)[1]
    taken = slot_sizes(program).total(pools)
    for kind in _policies(program):
        sizes, least = [(slot_sizes(program, remat=policy), policy) for policy in kind], taken
        for one, policy in sorted(sizes, key=lambda item: -item[0].total(pools)):
            other = one.total(pools)
            if least - other < WORTHWHILE:
                continue
            least = other
            enough = "fits" if short is None or taken - other >= short else "is not enough by itself"
            hosts = f", and {gib(one.on_host(table).max())} in the host's memory" if one.offloaded else ""
            yield (
                f"Execution.remat = {policy!r} ({now!r} now): what waits on each stage for its backwards takes "
                f"{gib(other)} GiB, not {gib(taken)}{hosts}{'' if short is None else f', which {enough}'} "
                f"(in use of stage {_of_each(one.of_stages(table))})"
            )


def _of_each(sizes: np.ndarray) -> str:
    return ", ".join(f"{stage}: {gib(size)}" for stage, size in enumerate(sizes))


def _policies(program: Program) -> Iterator[list[Any]]:
    """The policies worth trying by name and by names; then those with what goes to the host."""
    found = policies_of(program)
    yield found
    if program.placement.has_host_memory:
        yield offloads_of(set().union(*names_by_module(program).values()), found)


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
