"""Devices of machines that are not here: a described topology, for which the real compilers compile."""

import math
import os
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from axon.errors import UserError, suggest

TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")

LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}
"""Said beforehand, the compiler neither asks a metadata server for chips, nor claims them, nor complains."""

GPUS_PER_HOST = 8

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 151397597184 clock_rate_ghz: 1.98
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 20 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""
"""XLA's description of the GPU, as a `GpuTargetConfig` text proto."""

H200_BANDWIDTH = 4.8e12
"""Of its memory, bytes/s, as there."""

GPUS = {"h200": H200}

HBM = {
    "TPU v4": 32 * 2**30,
    "TPU v5 lite": 16 * 2**30,
    "TPU v5": 95 * 2**30,
    "TPU v6 lite": 32 * 2**30,
    "TPU7x": 96 * 2**30,
    "NVIDIA H200": 151397597184,
}
"""Bytes of memory of a device (JAX shows a chip of two cores as one device, but for TPU7x), by its kind. Sources:
Google Cloud TPU documentation, "System architecture"; for the H200 its description above."""


def device_memory(device: Any) -> int:
    """Bytes of a device's memory."""
    return HBM["NVIDIA H200" if device.platform in ("cuda", "gpu") else device.device_kind]


def devices(name: str) -> list[Any]:
    """The devices of a topology by name, to hand to `Program(devices=…)` and compile for; none of them can run.

    Args:
        name: `v5e:4x4`, `v5p:4x4x4`, … for TPUs, with the chips along each dimension; `h200:8` for GPUs, with how many,
            8 a host.

    Raises `UserError` for a name that does not exist, or where the compiler is not installed.
    """
    kind, _, shape = name.partition(":")
    if kind in TPUS:
        return _tpus(name)
    if kind in GPUS:
        return _gpus(name, GPUS[kind], shape)
    raise UserError(f"topology {name!r}: no chip is called {kind!r}.{suggest(kind, (*TPUS, *GPUS))}")


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
    if not count.isdecimal() or not int(count) or (int(count) > GPUS_PER_HOST and int(count) % GPUS_PER_HOST):
        raise UserError(f"topology {name!r}: write the number of GPUs as h200:8, a multiple of 8 beyond one host")
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
