"""Memory kept on each device from step to step, by its declarations; and how much memory a device has."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax

from axon.axes import ArraySpec
from axon.launch.host import free_memory
from axon.layout import Placement
from axon.train.optimizers import frozen_paths
from axon.train.step import Program

IN_FLIGHT = "in flight"
"""Name of the part of a step's arguments that a batch leaves for the next step, without a flush."""

FROZEN = "frozen models"
"""Name of the part of a step's arguments that no step changes: the models beside the one that is trained."""


def arguments(program: Program, placement: Placement | None = None) -> dict[str, int]:
    """Bytes of a step's arguments on each device, by what they are, without the compiler's padding.

    What the layout stores on the host is not counted; on CPU devices it is, as their memory is the host's. What it
    stores on disk never is.

    `placement`: the program's own, or another layout on its mesh.
    """
    placement = placement or program.placement
    state = program.specs
    batch = program.evaluator.specs
    parts = {"parameters": state.parameters, "optimizer": state.optimizer, "variables": state.variables}
    parts |= {IN_FLIGHT: state.in_flight, "batch": batch}
    used = {name: jax.tree.leaves(tree) for name, tree in parts.items()}
    found = {name: _bytes(specs, placement) for name, specs in used.items() if specs}
    frozen = jax.tree.leaves(program.references.specs)  # never elsewhere than on the devices
    return found | ({FROZEN: _bytes(frozen, replace(placement, host=(), disk={}))} if frozen else {})


def on_host(program: Program) -> int:
    """Bytes of a device's shards of the state that the layout stores in the host's memory."""
    specs = jax.tree.leaves((program.specs.parameters, program.specs.optimizer))
    placement = program.placement
    return sum(placement.bytes_per_device(spec) for spec in specs if placement.on_host(spec.axes, spec.kind))


def on_disk(program: Program) -> int:
    """Bytes of a device's shards of the state that the layout stores in files."""
    placement = program.placement
    specs = jax.tree.leaves(program.specs.optimizer)
    return sum(placement.bytes_per_device(spec) for spec in specs if placement.on_disk(spec.axes, spec.kind))


def least_memory(program: Program, placement: Placement | None = None) -> dict[str, int]:
    """The same with the gradients of what is trained: the least that training takes, between backward and update."""
    return arguments(program, placement) | {"gradients": _bytes(gradients(program), placement or program.placement)}


def gradients(program: Program) -> list[ArraySpec]:
    """The gradients of a step, of what is trained alone."""
    frozen = frozen_paths(program.optimizer, program.parameters)
    return [replace(spec, kind="grads") for path, spec in program.parameters.items() if path not in frozen]


def _bytes(specs: Iterable[ArraySpec], placement: Placement) -> int:
    is_host = placement.platform == "cpu"
    in_memory = (spec for spec in specs if not placement.on_disk(spec.axes, spec.kind))
    own = (spec for spec in in_memory if is_host or not placement.on_host(spec.axes, spec.kind))
    return sum(map(placement.bytes_per_device, own))


def available(placement: Placement) -> int | None:
    """Bytes that programs can have on each device; None where nobody knows.

    The CPU devices of a process share what is free on its machine.
    """
    local = local_devices(placement)
    if placement.platform == "cpu":
        free = free_memory()
        return None if free is None else free // len(local)
    return (local[0].memory_stats() or {}).get("bytes_limit")


def local_devices(placement: Placement) -> list[Any]:
    """The devices of the mesh that are this process's."""
    return [device for device in placement.devices if device.process_index == jax.process_index()]


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.2f}"
