"""Devices of machines that are not here: a described topology, for which the real compilers compile."""

import math
import os
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from axon.chips import chips, known, part
from axon.errors import UserError, suggest

LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}
"""Said beforehand, the compiler neither asks a metadata server for chips, nor claims them, nor complains."""

GPUS_PER_HOST = 8


def device_memory(device: Any) -> int:
    """Bytes of a device's memory. Raises `UserError` for a chip that is not known."""
    return int(known(device.device_kind).memory * part(device))


def devices(name: str) -> list[Any]:
    """The devices of a topology by name, to hand to `Program(devices=…)` and compile for; none of them can run.

    Args:
        name: `v5e:4x4`, `v5p:4x4x4`, … for TPUs, with the chips along each dimension; `h200:8`, `h100:8` or `a100:8`
            for GPUs, with how many, 8 a host.

    Raises `UserError` for a name that does not exist, or where the compiler is not installed.
    """
    kind, _, shape = name.partition(":")
    targets = {chip.name: chip.target for chip in chips().values() if chip.topology}
    if kind not in targets:
        raise UserError(f"topology {name!r} (--on): no chip is called {kind!r}.{suggest(kind, targets)}")
    return _gpus(name, targets[kind], shape) if targets[kind] else _tpus(name)


def _tpus(name: str) -> list[Any]:
    _need("libtpu", name)
    for variable, value in LIBTPU.items():
        os.environ.setdefault(variable, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"topology {name!r}: the TPU compiler refuses it ({_first_line(error)}); write it as v5e:4x4"
        ) from error


def _gpus(name: str, target: str, count: str) -> list[Any]:
    _need("jax_cuda13_plugin", name)
    kind = name.partition(":")[0]
    if not count.isdecimal() or not int(count) or (int(count) > GPUS_PER_HOST and int(count) % GPUS_PER_HOST):
        raise UserError(f"topology {name!r}: write the number of GPUs as {kind}:8, a multiple of 8 beyond one host")
    hosts = math.ceil(int(count) / GPUS_PER_HOST)
    shape = f"1x{hosts}x{int(count) // hosts}"
    return list(topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices)


def _need(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise UserError(
            f"topology {name!r} needs its compiler, and {package} is not installed: run scripts/setup compilers"
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
