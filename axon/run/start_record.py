"""On what a run starts, for its events, and what differs from the start before."""

import os
import re
import socket
from collections.abc import Mapping
from typing import Any

import jax

from axon.launch.host import multiplies_bfloat16
from axon.train.step import Program

COMPARED = ("devices", "device_kind", "mesh", "processes")


def described(program: Program, until: int) -> dict[str, Any]:
    """Devices, mesh and processes of this start, and the step it is to end at."""
    devices = program.placement.devices
    return {
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "mesh": dict(program.placement.mesh.shape),
        "processes": jax.process_count(),
        "until": until,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name → what it was and what it is, of devices, mesh and processes that differ."""
    return {name: [before.get(name), now[name]] for name in COMPARED if before.get(name) != now[name]}


def changes_text(changed: Mapping[str, list[Any]]) -> str:
    """`changes` for a person: `mesh {'data': 4} → {'data': 2}, processes 2 → 1`."""
    return ", ".join(f"{name} {before} → {now}" for name, (before, now) in changed.items())


def script_notices(config: str) -> list[str]:
    """A line on the classes of a run's config.gin that only the script that trains it has, if there are any."""
    names = re.findall(r"^from __main__ import (\w+)", config, re.MULTILINE)
    if not names:
        return []
    return [
        f"{', '.join(names)}: defined in the script or notebook that runs, so no command (axon eval, generate, …) can "
        "open this run: move it to a module of its own, as mine.py, and import it from there"
    ]


def dtype_notices(program: Program) -> list[str]:
    """A line where a CPU that multiplies bfloat16 several times as fast as float32 multiplies float32."""
    runtime = program.runtime
    dtype = runtime.precision.compute_dtype(platform := runtime.placement.platform)
    if platform != "cpu" or dtype.name != "float32" or not multiplies_bfloat16():
        return []
    fast = "these cores have matrix instructions for bfloat16 (AMX)"
    return [f"{fast}: Precision.compute = 'bfloat16' may be twice as fast"]
