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

from axon.chips import chip_of, part

FORMULA = (
    "MFU = tokens/s × FLOPs per token ÷ (peak FLOP/s per device × devices);  "
    "FLOPs per token = 6 · matmul parameters (with the output head, without the embedding look-up; "
    "of frozen ones 4 where a gradient passes through, 2 where none does) "
    "+ 12 · heads · head_dim · keys seen, summed over layers (causal attention, counted once: seq / 2; windows less)"
)


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of all devices together, None if unknown, and a description of where the figure is from."""

    flops: float | None
    source: str


def peak(devices: Sequence[Any], compute: str = "float32") -> Peak:
    """The peak of `devices` (`jax.Device`s of one kind): as `axon.chips` knows it, or measured if they are a CPU's, in
    the dtype of the run's products."""
    device, count = devices[0], len(devices)
    if device.platform == "cpu":
        hosts = len({d.process_index for d in devices})
        own = [d for d in devices if d.process_index == jax.process_index()]
        text = f"{compute} matmul measured on this CPU, whose cores its devices share"
        return Peak(measured_matmul_peak(len(own), compute) * hosts, text)
    per_device = device_peak(device)
    if per_device is None:
        return Peak(None, f"unknown for {device.device_kind!r}, so MFU is not reported")
    return Peak(per_device * count, f"{count} × {per_device / 1e12:g} TFLOP/s, dense bf16, {device.device_kind}")


def device_peak(device: Any) -> float | None:
    """Dense bf16 FLOP/s of one device, which may be one core of a chip; None for a chip that is not known."""
    chip = chip_of(device.device_kind)
    return None if chip is None else chip.peak * part(device)


@cache
def measured_matmul_peak(devices: int = 1, dtype: str = "float32", *, size: int = 1024, seconds: float = 0.3) -> float:
    """FLOP/s of this machine's CPU: the fastest `size` × `size` products within `seconds`. Measured once.

    The faster of two: one device alone, whose product all cores share, and so many at once, which wait for each other
    less often.
    """
    local = jax.local_devices(backend="cpu")[:devices]
    operands = [jax.device_put(jnp.ones((size, size), dtype), device) for device in local]
    product = jax.jit(jnp.matmul)

    def fastest(operands: Sequence[jax.Array], seconds: float) -> float:
        jax.block_until_ready([product(x, x) for x in operands])
        times, end = list[float](), time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            begun = time.perf_counter()
            jax.block_until_ready([product(x, x) for x in operands])
            times.append(time.perf_counter() - begun)
        return 2 * size**3 * len(operands) / min(times)

    together = [operands] if devices > 1 else []
    return max(fastest(one, seconds / (1 + len(together))) for one in (operands[:1], *together))


def mfu(tokens_per_second: float, flops_per_token: float, peak: Peak) -> float | None:
    """Model FLOPs utilisation, a fraction of 1, by `FORMULA`; None where the peak is not known.

    `flops_per_token` is the model's own count, as `axon.nn.LanguageModel.flops_per_token`.
    """
    return None if peak.flops is None else tokens_per_second * flops_per_token / peak.flops
