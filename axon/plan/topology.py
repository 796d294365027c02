"""Devices of machines that are not here: a described topology, for which the real compilers compile."""

import os
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from axon.chips import chips, known, part
from axon.chips.target import Target
from axon.errors import UserError

LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}
"""Said beforehand, the compiler neither asks a metadata server for chips, nor claims them, nor complains."""


def device_memory(device: Any) -> int:
    """Bytes of a device's memory. Raises `UserError` for a chip that is not known."""
    return int(known(device.device_kind).memory * part(device))


def devices(name: str) -> list[Any]:
    """The devices of a topology by name, to hand to `Program(devices=…)` and compile for; none of them can run.

    Args:
        name: as of `axon.chips.target.Target`, of a chip that programs can be compiled for.

    Raises `UserError` for a name that does not exist, or where the compiler is not installed.
    """
    target = Target.of(name, {chip.name: chip for chip in chips().values() if chip.topology})
    return _gpus(target) if target.chip.target else _tpus(target)


def _tpus(target: Target) -> list[Any]:
    name = target.name
    _need("libtpu", name)
    for variable, value in LIBTPU.items():
        os.environ.setdefault(variable, value)
    slices = {"num_slices": target.slices} if target.slices > 1 else {}
    one = f"{target.chip.name}:{'x'.join(map(str, target.shape))}"
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=one, **slices).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"topology {name!r}: the TPU compiler refuses it ({_first_line(error)}); write it as v5e:4x4"
        ) from error


def _gpus(target: Target) -> list[Any]:
    _need("jax_cuda13_plugin", target.name)
    shape = "x".join(map(str, (1, *target.shape)))
    described = topologies.get_topology_desc(platform="cuda", target_config=target.chip.target, topology=shape)
    return list(described.devices)


def _need(package: str, name: str) -> None:
    if find_spec(package) is None:
        raise UserError(
            f"topology {name!r} needs its compiler, and {package} is not installed: run scripts/setup compilers"
        )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
