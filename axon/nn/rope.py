"""Rotary position embedding (Su et al., arXiv:2104.09864)."""

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
        attention_factor: of cosine and sine, whose square multiplies the scores; m(mscale) / m(mscale_all_dim) by
            default, where m(x) = 0.1·x·ln(factor) + 1.
        truncate: whether the ramp begins and ends at frequencies that there are, rather than between two.
        mscale, mscale_all_dim: x of these; the scores are multiplied by m(mscale_all_dim)² besides, also those of
            dimensions that are not rotated (DeepSeek-V2, arXiv:2405.04434, section 3.1.4).
    """

    factor: float
    original: int = 4096
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        check_range(self, "[1, inf)", "factor")
        check_range(self, "[0, inf)", "mscale", "mscale_all_dim")
        check_range(self, "(0, inf)", "original", "fast", "slow", "attention_factor")
        if self.slow >= self.fast:
            raise UserError(f"YarnScaling.slow is {self.slow}; must be below YarnScaling.fast, which is {self.fast}")

    @property
    def magnitude(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by besides."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1

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

    @property
    def score_scale(self) -> float:
        """What the scaling multiplies scores by, besides what it does to cosine and sine."""
        return self.scaling.score_scale if isinstance(self.scaling, YarnScaling) else 1.0

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


def rotate(x: Array, angles: Angles, interleaved: bool = False) -> Array:
    """`x[batch seq heads head_dim]` rotated by `angles`; pair i is of elements i and i + head_dim/2.

    `interleaved`: of elements 2i and 2i + 1 instead (DeepSeek), which come out at i and i + head_dim/2: in the same
    order for queries and keys, so that their products do not see it.
    """
    cos, sin = (a[:, :, None, :].astype(x.dtype) for a in (angles.cos, angles.sin))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
