"""Model FLOPs utilisation: how much of the chips' peak the model's own arithmetic uses.

Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B, but without the masked half of causal attention, which a
kernel need not compute.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

FORMULA = (
    "MFU = tokens/s × FLOPs per token ÷ (peak FLOP/s per device × devices);  "
    "FLOPs per token = 6 · matmul parameters (with the output head, without the embedding look-up) "
    "+ 12 · heads · head_dim · keys seen, summed over layers (causal attention, counted once: seq / 2; windows less)"
)

# Dense bf16 FLOP/s of a chip, without sparsity, and how many TensorCores it has: JAX shows a chip of several cores as
# one device or as several. Keys are `jax.Device.device_kind`. Sources: Google Cloud TPU documentation, "System
# architecture" pages of v4, v5e, v5p, v6e and TPU7x; NVIDIA's data sheets of each product (their figures "with
# sparsity" halved).
_PEAKS: dict[str, tuple[float, int]] = {
    "TPU v4": (275e12, 2),
    "TPU v5 lite": (197e12, 1),
    "TPU v5": (459e12, 2),
    "TPU v5p": (459e12, 2),
    "TPU v6 lite": (918e12, 1),
    "TPU v6e": (918e12, 1),
    "TPU7x": (2307e12, 2),
    "NVIDIA A100-SXM4-40GB": (312e12, 1),
    "NVIDIA A100-SXM4-80GB": (312e12, 1),
    "NVIDIA A100-PCIE-40GB": (312e12, 1),
    "NVIDIA A100 80GB PCIe": (312e12, 1),
    "NVIDIA L4": (121e12, 1),
    "NVIDIA L40S": (362e12, 1),
    "NVIDIA H100 80GB HBM3": (989.4e12, 1),
    "NVIDIA H100 PCIe": (756e12, 1),
    "NVIDIA H100 NVL": (835.5e12, 1),
    "NVIDIA H200": (989.4e12, 1),
    "NVIDIA H200 NVL": (835.5e12, 1),
    "NVIDIA GH200 480GB": (989.4e12, 1),
    "NVIDIA B200": (2250e12, 1),
    "NVIDIA GB200": (2500e12, 1),
}


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of all devices together, None if unknown, and a description of where the figure is from."""

    flops: float | None
    source: str


def peak(devices: Sequence[Any]) -> Peak:
    """The peak of `devices` (`jax.Device`s of one kind): from the table, or measured if they are a CPU's."""
    device, count = devices[0], len(devices)
    if device.platform == "cpu":
        hosts = len({d.process_index for d in devices})
        return Peak(measured_matmul_peak() * hosts, "float32 matmul measured on this CPU")
    per_device = device_peak(device)
    if per_device is None:
        return Peak(None, f"unknown for {device.device_kind!r}, so MFU is not reported")
    return Peak(per_device * count, f"{count} × {per_device / 1e12:g} TFLOP/s, dense bf16, {device.device_kind}")


def device_peak(device: Any) -> float | None:
    """Dense bf16 FLOP/s of one device, which may be one core of a chip; None if its kind is not in the table."""
    if device.device_kind not in _PEAKS:
        return None
    return peak_of(device.device_kind, getattr(device, "num_cores", None) or None)


def peak_of(kind: str, cores: int | None = None) -> float:
    """Dense bf16 FLOP/s of so many cores, by default all, of a chip in the table."""
    chip, all_cores = _PEAKS[kind]
    return chip * (cores or all_cores) / all_cores


@cache
def measured_matmul_peak(size: int = 1024, seconds: float = 0.3) -> float:
    """FLOP/s of this machine's CPU: the fastest float32 `size` × `size` product within `seconds`. Measured once."""
    device = jax.local_devices(backend="cpu")[0]
    x = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        jax.block_until_ready(product(x, x))
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def mfu(tokens_per_second: float, flops_per_token: float, peak: Peak) -> float | None:
    """Model FLOPs utilisation, a fraction of 1, by `FORMULA`; None where the peak is not known.

    `flops_per_token` is the model's own count, as `axon.nn.LanguageModel.flops_per_token`.
    """
    return None if peak.flops is None else tokens_per_second * flops_per_token / peak.flops
