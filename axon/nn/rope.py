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
class YarnScaling:
    """YaRN: long wavelengths divided by `factor`, short ones as they are, a ramp between (arXiv:2309.00071).

    Args:
        original: positions that a model was trained on before. fast, slow: how often a frequency rotates over these
            where the ramp begins, and where it ends.
        attention_factor: of cosine and sine, whose square multiplies the scores; 0.1·ln(factor) + 1 by default.
        truncate: whether the ramp begins and ends at frequencies that there are, rather than between two.
    """

    factor: float
    original: int = 4096
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        check_range(self, "[1, inf)", "factor")
        check_range(self, "(0, inf)", "original", "fast", "slow", "attention_factor")
        if self.slow >= self.fast:
            raise UserError(f"YarnScaling.slow is {self.slow}; must be below YarnScaling.fast, which is {self.fast}")

    @property
    def magnitude(self) -> float:
        """What cosine and sine are multiplied by."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        index, logs = np.arange(len(frequencies)), np.log(frequencies)
        step = (logs[0] - logs[-1]) / max(len(logs) - 1, 1) or 1.0
        rotations = np.log([self.fast, self.slow]) + math.log(2 * math.pi / self.original)
        first, last = (logs[0] - rotations) / step  # indices of the frequencies that rotate so often
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
        scaled = np.clip((index - first) / max(last - first, 1e-3), 0, 1)
        return frequencies * (1 - scaled + scaled / self.factor)


@dataclass(frozen=True)
class Rope:
    """The frequencies at which `positions` rotate: theta^(−2i/head_dim), scaled."""

    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def __post_init__(self):
        check_range(self, "(0, inf)", "theta")

    def angles(self, positions: Array, head_dim: int) -> "Angles":
        """Those of `positions[batch seq]`."""
        frequencies = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        if self.scaling is not None:
            frequencies = self.scaling.apply(frequencies)
        cos, sin = _cos_and_sin(positions[..., None].astype(jnp.float32) * frequencies.astype(np.float32))
        if isinstance(self.scaling, YarnScaling):
            cos, sin = cos * self.scaling.magnitude, sin * self.scaling.magnitude
        return Angles(self, head_dim, cos, sin)


def _cos_and_sin(radians: Array) -> tuple[Array, Array]:
    if platform() != "cpu":
        return jnp.cos(radians), jnp.sin(radians)

    def wave(of_sine):
        return jnp.where(of_sine, jnp.sin(radians), jnp.cos(radians))

    # In a loop: outside of one, XLA for CPUs computes both anew in each fusion that uses them, head by head.
    cos, sin = lax.map(wave, jnp.array([False, True]))
    return cos, sin


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
