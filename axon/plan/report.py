"""A training step compiled for a machine that is not here: does it fit, what does it do, what does it send?"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from axon.errors import UserError
from axon.plan.bundles import kernel_cycles, recorded_chip
from axon.plan.collectives import Collective, collectives
from axon.plan.compiled import cycles, host_bytes, kernels, largest_arrays, memory_parts, total_bytes
from axon.plan.flops import count_jaxpr
from axon.plan.hlo import Module
from axon.plan.memory import arguments, gib, on_disk
from axon.plan.out_of_memory import did_not_fit, exceeded, too_large
from axon.plan.topology import device_memory
from axon.runtime import Runtime
from axon.train.step import Program

GIB = 2**30
BEYOND_CAPACITY = "as nothing: only a load of experts beyond capacity enters it"


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind along the same mesh axes, in one step of one device.

    `bytes`: of their results; `sent`: what a device sends in a ring; `asynchronous`: the part of `sent` during
    which other work may run.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    count: int
    bytes: int
    sent: float
    asynchronous: float


@dataclass(frozen=True)
class Report:
    """The compiler's report of a step; bytes, FLOPs and cycles are those of one device and one step.

    Args:
        memory: `arguments` (of which `parameters`, `optimizer`, `batch` and `cache`, unpadded), `outputs`, `aliased`,
            `temporaries`, `code`, their `total`, and `available`: the device's memory; `host`: of the host's, that each
            device uses; and `disk`: in files, of each device.
        cycles: the TPU compiler's estimates × loop trip counts: see `axon.plan.compiled.cycles`.
        kernel_cycles: of each Pallas kernel by its bundles: see `axon.plan.bundles.kernel_cycles`.
        model_flops: by `axon.observe.mfu.FORMULA`; executed_flops: of the traced step, what remat repeats included.
        asynchronous: share of the bytes sent during which other work may run.
        uncounted: what could not be counted exactly.
    """

    target: str
    devices: int
    mesh: dict[str, int]
    memory: dict[str, int]
    cycles: dict[str, int]
    kernel_cycles: dict[str, int]
    model_flops: float
    executed_flops: float
    collectives: tuple[Traffic, ...]
    asynchronous: float
    kernels: dict[str, int]
    choices: dict[str, str]
    options: dict[str, Any]
    compile_seconds: float
    uncounted: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        """As plain dicts, lists, numbers and strings."""
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Report":
        """The report of which `told` is the JSON."""
        traffic = (Traffic(**{**one, "mesh_axes": tuple(one["mesh_axes"])}) for one in told["collectives"])
        return cls(**{**told, "collectives": tuple(traffic), "uncounted": tuple(told["uncounted"])})


class DoesNotFit(UserError):
    """A compiled program that its devices have no room for.

    Args:
        needed: bytes of a device, at least: the compiler may stop at its temporaries. None if it does not say.
    """

    def __init__(self, message: str, needed: float | None):
        super().__init__(message)
        self.needed = needed


def compile_step(program: Program, target: str) -> tuple[Report, str]:
    """Compile the whole training step of `program`, whose devices are those of topology `target`; its HLO text.

    Raises `DoesNotFit`: by how much, and what is largest.
    """
    return compile_lowered(program, target, program.lower())


def compile_lowered(program: Program, target: str, lowered: Any) -> tuple[Report, str]:
    """`compile_step` of a step that is lowered already."""
    compiled, seconds = compile_timed(lowered, lambda message: did_not_fit(program, target, message))
    text = compiled.as_text()
    module = Module.of(text)
    memory = _memory(program, compiled)
    if memory["total"] > memory["available"]:
        needed, room = memory["total"], memory["available"]
        message = too_large(program, target, f"it needs {gib(needed)}", needed, room, largest_arrays(module))
        raise DoesNotFit(message, needed)
    return _report(program, target, module, memory, seconds), text


def compile_timed(lowered: Any, refusal: Callable[[str], str]) -> tuple[Any, float]:
    """A lowered program, compiled, and the seconds that took. Raises `DoesNotFit` with what `refusal` makes of the
    compiler's message."""
    begun = time.perf_counter()
    try:
        return lowered.compile(), time.perf_counter() - begun
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = exceeded(str(error))
        raise DoesNotFit(refusal(str(error)), needed and needed[1]) from None


def _report(program: Program, target: str, module: Module, memory: dict[str, int], seconds: float) -> Report:
    report = described(program.runtime, target, module, program.trace().jaxpr.jaxpr, memory, seconds)
    flops = _model_flops(program) / report.devices
    return replace(report, model_flops=flops, uncounted=(*report.uncounted, *_outside(program)))


def described(
    runtime: Runtime, target: str, module: Module, jaxpr: Any, memory: dict[str, int], seconds: float
) -> Report:
    """Of a compiled program of a runtime, traced as `jaxpr`, without `model_flops`."""
    mesh, devices = dict(runtime.placement.mesh.shape), len(runtime.placement.devices)
    traffic = summed(collectives(module), mesh)
    sent = sum(one.sent for one in traffic)
    counted = count_jaxpr(jaxpr)
    chip = recorded_chip(runtime.placement)
    return Report(
        target=target,
        devices=devices,
        mesh=mesh,
        memory=memory,
        cycles=cycles(module),
        kernel_cycles=kernel_cycles(module, chip) if chip else {},
        model_flops=0.0,
        executed_flops=counted.flops / devices,
        collectives=traffic,
        asynchronous=sum(one.asynchronous for one in traffic) / sent if sent else 0.0,
        kernels=kernels(module),
        choices=dict(runtime.choices),
        options=dict(runtime.compiler_options),
        compile_seconds=seconds,
        uncounted=(*counted.uncounted, *_loops(module)),
    )


def _loops(module: Module) -> Iterator[str]:
    """Lines about loops whose length is not known, one for all that count alike."""
    alike: dict[str, list[str]] = {}
    for name, trips in module.unknown_loops.items():
        alike.setdefault("once" if trips else BEYOND_CAPACITY, []).append(name)
    for counts, (first, *more) in alike.items():
        others = f" and {len(more)} more" if more else ""
        yield f"loop {first}{others}: the length is not in the program, and counts {counts}"


def _outside(program: Program) -> tuple[str, ...]:
    """What of a step the compiled program does not do."""
    return ("the update, one layer at a time from files, is not in the program",) * bool(program.placement.disk)


def summed(found: list[Collective], mesh: Mapping[str, int]) -> tuple[Traffic, ...]:
    """One line for each kind and mesh axes, the largest first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for one in found:
        groups.setdefault((one.kind, one.mesh_axes(mesh)), []).append(one)
    lines = [
        Traffic(
            kind,
            axes,
            sum(one.times for one in ones),
            sum(one.bytes * one.times for one in ones),
            sum(one.sent * one.times for one in ones),
            sum(one.sent * one.times for one in ones if one.asynchronous),
        )
        for (kind, axes), ones in groups.items()
    ]
    return tuple(sorted(lines, key=lambda line: -line.sent))


def _memory(program: Program, compiled: Any) -> dict[str, int]:
    parts = memory_parts(compiled)
    available = device_memory(program.placement.devices[0])
    elsewhere = {"host": host_bytes(compiled), "disk": on_disk(program)}
    return parts | arguments(program) | {"total": total_bytes(parts), "available": available} | elsewhere


def _model_flops(program: Program) -> int:
    return program.flops_per_token * program.batch * program.seq
