"""Which attentions the Hopper kernels support, and in which tiles; known without importing Pallas."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.kernels import hopper
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs


class Sizes(NamedTuple):
    """A kernel's tile along the loop and how many such tiles are in flight.

    Args:
        tile: keys of a step of the forward and of dq, queries of a step of dk and dv.
        stages: how many such tiles shared memory holds.
    """

    tile: int
    stages: int


class KernelSizes(NamedTuple):
    """Of the forward, of the gradient of queries, and of those of keys and values."""

    forward: Sizes
    queries: Sizes
    keys: Sizes


SIZES = {
    (64, 64): KernelSizes(Sizes(128, 4), Sizes(128, 2), Sizes(64, 4)),
    (128, 128): KernelSizes(Sizes(128, 2), Sizes(64, 3), Sizes(64, 3)),
    (192, 128): KernelSizes(Sizes(128, 2), Sizes(64, 2), Sizes(64, 3)),
    (256, 256): KernelSizes(Sizes(64, 2), Sizes(64, 1), Sizes(64, 2)),
}
"""Widths of keys and of values → tiles with which nothing spills, and as many in flight as shared memory holds."""


def unsupported(
    q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs, chip: str
) -> str | None:
    """Why the kernels cannot run this on a chip; None if they can."""
    if (reason := hopper.unsupported(chip)) is not None:
        return reason
    if (q.shape[3], v.shape[3]) not in SIZES:
        known = ", ".join(str(a) if a == b else f"{a} (values {b})" for a, b in SIZES)
        return f"it supports head_dim {known}, not {q.shape[3]} (values {v.shape[3]})"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        return f"it supports bfloat16 and float16, the same for all, not {q.dtype}, {k.dtype} and {v.dtype}"
    if config.scale <= 0:
        return f"it needs a scale above 0, not {config.scale:g}"
    extra = {
        "soft cap": config.soft_cap,
        "sinks": inputs.sinks,
        "ALiBi slopes": inputs.alibi_slopes,
        "bias by distance": inputs.distance_bias,
    }
    lacking = [name for name, x in extra.items() if x is not None]
    return f"it has no {' and no '.join(lacking)}" if lacking else None
