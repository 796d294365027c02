"""The operations that ran on the devices, from a trace that `jax.profiler` wrote."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from axon.errors import UserError
from axon.train.loop import HOST_SPANS

NANO = 1e-9

_DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
_INSTRUCTION = re.compile(r"%?([\w.-]+)(?: = .*)?", re.DOTALL)
_STREAM, _OPERATIONS, _PROGRAMS = "Stream #", ("XLA Ops", "Async XLA Ops"), "XLA Modules"


@dataclass(frozen=True, slots=True)
class Event:
    """One operation on a device, from `begin` to `end` in nanoseconds.

    Args:
        operation: the name of the HLO instruction; "" where the trace does not say. kernel: what the trace calls it.
        program: the name of the HLO module; "" where the trace does not say.
    """

    device: int
    operation: str
    kernel: str
    program: str
    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What ran: the operations of all devices, and of what `HOST_SPANS` names the seconds of a process, in all."""

    events: list[Event]
    host: dict[str, float]


def read_trace(folder: Path) -> Trace:
    """The latest trace below `folder`, an `.xplane.pb` of each process.

    Operations are on a CPU XLA's thunks on any thread, on GPUs the kernels and copies of every stream, on TPUs the
    lines of XLA's operations, those that run asynchronously too.

    Raises `UserError` where there is no trace, or no operation in it.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: (path.parent.stat().st_mtime, path.name))
    if not files:
        raise UserError(f"{folder} has no trace: an .xplane.pb of jax.profiler is expected in it or below")
    latest = [path for path in files if path.parent == files[-1].parent]
    host: Counter[str] = Counter()
    found = list(chain.from_iterable(_of_process(ProfileData.from_file(str(path)), host) for path in latest))
    if not found:
        raise UserError(f"{files[-1]} has no operation of a device: was a step executed while it was traced?")
    return Trace(found, {name: host[name] * NANO / len(latest) for name in HOST_SPANS if host[name]})


def _of_process(data: Any, host: Counter[str]) -> list[Event]:
    """Where there are GPUs or TPUs, what the host's own line says of operations is that it launches them."""
    planes = list(data.planes)
    devices = [(plane, int(found[1])) for plane in planes if (found := _DEVICE.fullmatch(plane.name))]
    launched = [event for plane in planes if plane.name.startswith("/host:CPU") for event in _of_host(plane, host)]
    return [event for plane, device in devices for event in _of_device(plane, device)] or launched


def _of_host(plane: Any, host: Counter[str]) -> Iterator[Event]:
    """The operations of CPU devices; what the host's own spans take is added to `host`, in nanoseconds."""
    for event in (event for line in plane.lines for event in line.events):
        if event.name in HOST_SPANS:
            host[event.name] += round(event.duration_ns)
        elif "hlo_op" in (stats := dict(event.stats)):
            device = int(stats.get("device_ordinal", 0))
            yield _event(device, stats["hlo_op"], event, str(stats.get("hlo_module", "")))


def _of_device(plane: Any, device: int) -> Iterator[Event]:
    lines = list(plane.lines)
    streams = [line for line in lines if line.name.startswith(_STREAM)]
    programs = _programs(lines)
    for line in streams or [line for line in lines if line.name in _OPERATIONS]:
        for event in line.events:
            stats = dict(event.stats)
            named = None if streams else _INSTRUCTION.fullmatch(event.name)
            operation = str(stats.get("hlo_op") or (named[1] if named else ""))
            program = str(stats.get("hlo_module") or _program_at(programs, event.start_ns)).partition("(")[0]
            yield _event(device, operation, event, program)


def _event(device: int, operation: str, event: Any, program: str) -> Event:
    return Event(device, operation, event.name, program, event.start_ns, event.start_ns + event.duration_ns)


def _programs(lines: list[Any]) -> list[tuple[float, float, str]]:
    """Begin, end and name of each execution of a program, where a device has a line of them: `jit__train(123)`."""
    ran = (event for line in lines if line.name == _PROGRAMS for event in line.events)
    return [(one.start_ns, one.start_ns + one.duration_ns, one.name) for one in ran]


def _program_at(programs: list[tuple[float, float, str]], moment: float) -> str:
    return next((name for begin, end, name in programs if begin <= moment < end), "")
