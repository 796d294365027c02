"""Rotary position embedding (Su et al., arXiv:2104.09864), halves rotated against each other."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon.checks import check_range
from axon.errors import UserError
from axon.kernels.choice import platform


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al., arXiv:2306.15595)."""

    factor: float

    def __post_init__(self):
        check_range(self, "(0, inf)", "factor")

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths divided by `factor`, short ones as they are, a ramp between (arXiv:2407.21783)."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self):
        check_range(self, "(0, inf)", "factor", "low", "high", "original")
        if self.low >= self.high:
            raise UserError(f"Llama3Scaling.low is {self.low}; must be below Llama3Scaling.high, which is {self.high}")

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class Rope:
    """The frequencies at which `positions` rotate: theta^(−2i/head_dim), scaled."""

    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | None = None

    def __post_init__(self):
        check_range(self, "(0, inf)", "theta")

    def angles(self, positions: Array, head_dim: int) -> "Angles":
        """Those of `positions[batch seq]`."""
        frequencies = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        if self.scaling is not None:
            frequencies = self.scaling.apply(frequencies)
        radians = positions[..., None].astype(jnp.float32) * frequencies.astype(np.float32)
        if platform() != "cpu":
            return Angles(self, head_dim, jnp.cos(radians), jnp.sin(radians))

        def wave(of_sine):
            return jnp.where(of_sine, jnp.sin(radians), jnp.cos(radians))

        # In a loop: outside of one, XLA for CPUs computes both anew in each fusion that uses them, head by head.
        cos, sin = lax.map(wave, jnp.array([False, True]))
        return Angles(self, head_dim, cos, sin)


@partial(jax.tree_util.register_dataclass, data_fields=["cos", "sin"], meta_fields=["rope", "head_dim"])
@dataclass(frozen=True)
class Angles:
    """Cosine and sine, `batch seq head_dim/2` float32, by which `rope` rotates heads of `head_dim`."""

    rope: Rope
    head_dim: int
    cos: Array
    sin: Array


def rotate(x: Array, angles: Angles) -> Array:
    """`x[batch seq heads head_dim]` rotated by `angles`."""
    cos, sin = (a[:, :, None, :].astype(x.dtype) for a in (angles.cos, angles.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
