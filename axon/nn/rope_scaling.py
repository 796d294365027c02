"""Scalings of rotary frequencies, by which a model sees further than it was trained to."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.checks import check_range
from axon.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """A rule that changes the frequencies of rotary embedding, and perhaps the size of scores."""

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine."""
        return 1.0

    @property
    def score_scale(self) -> float:
        """The further factor of latent attention's scores."""
        return 1.0

    @property
    def changes_at(self) -> int | None:
        """The position from which on a sequence that has it rotates by other frequencies, all of it; None: there is
        none."""
        return None

    @property
    def longest(self) -> int | None:
        """Positions up to which keys rotate alike whatever follows them, so that text can be written; None: any."""
        return None

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        """The scaled `frequencies`, where these are the same for every sequence."""
        raise NotImplementedError

    def at(self, positions: Array, frequencies: np.ndarray, last: Array | None) -> np.ndarray | Array:
        """The scaled frequencies by which `positions[batch seq]` rotate, `frequencies` or `batch seq frequencies`.

        `last[batch seq]`: the last position of each one's sequence, by default the row's.
        """
        return self.apply(frequencies)


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Positions divided by `factor` (Chen et al., arXiv:2306.15595)."""

    factor: float

    def __post_init__(self):
        check_range(self, "(0, inf)", "factor")

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True)
class ProportionalScaling(RopeScaling):
    """Of the pairs of a head the first `fraction` rotate, divided by `factor`; the others stay (Gemma 4)."""

    fraction: float
    factor: float = 1.0

    def __post_init__(self):
        check_range(self, "[0, 1]", "fraction")
        check_range(self, "(0, inf)", "factor")

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        rotated = int(self.fraction * 2 * len(frequencies) // 2)
        return np.where(np.arange(len(frequencies)) < rotated, frequencies / self.factor, 0.0)


@dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """NTK-aware interpolation of sequences longer than `original` positions, all of them: theta grows with their length
    (bloc97 and emozilla, 2023; Peng et al., arXiv:2309.00071, appendix B.2)."""

    factor: float
    original: int

    def __post_init__(self):
        check_range(self, "(0, inf)", "factor")
        check_range(self, "[1, 2**31)", "original")

    @property
    def longest(self) -> int:
        return self.original

    def at(self, positions: Array, frequencies: np.ndarray, last: Array | None) -> Array:
        if len(frequencies) < 2:
            raise UserError("DynamicScaling: one pair of a head is rotated; must be two or more")
        last = jnp.max(positions, axis=1, keepdims=True) if last is None else last
        length = jnp.maximum(last[..., None] + 1, self.original).astype(jnp.float32)
        stretch = self.factor * length / self.original - (self.factor - 1)
        powers = -np.arange(len(frequencies), dtype=np.float32) / (len(frequencies) - 1)
        return jnp.asarray(frequencies, jnp.float32) * stretch**powers


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
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
class YarnScaling(RopeScaling):
    """YaRN: long wavelengths divided by `factor`, short ones as they are, a ramp between (arXiv:2309.00071).

    Args:
        original: positions that a model was trained on before. fast, slow: how often a frequency rotates over these
            where the ramp begins, and where it ends.
        attention_factor: of cosine and sine, whose square multiplies the scores; by default m(1), where
            m(x) = 0.1·x·ln(factor) + 1, or, where neither `mscale` nor `mscale_all_dim` is 0,
            m(mscale) / m(mscale_all_dim).
        truncate: whether the ramp begins and ends at frequencies that there are, rather than between two.
        mscale_all_dim: latent attention multiplies scores by m(mscale_all_dim)² besides, also those of dimensions that
            are not rotated (DeepSeek-V2, arXiv:2405.04434, section 3.1.4).
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
        check_range(self, "[0, inf)", "mscale", "mscale_all_dim")
        check_range(self, "(0, inf)", "factor", "original", "fast", "slow", "attention_factor")
        if self.slow >= self.fast:
            raise UserError(f"YarnScaling.slow is {self.slow}; must be below YarnScaling.fast, which is {self.fast}")

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def score_scale(self) -> float:
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(max(self.factor, 1.0)) + 1

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        index, logs = np.arange(len(frequencies)), np.log(frequencies)
        step = (logs[0] - logs[-1]) / max(len(logs) - 1, 1) or 1.0
        rotations = np.log([self.fast, self.slow]) + math.log(2 * math.pi / self.original)
        first, last = (logs[0] - rotations) / step  # indices of the frequencies that rotate so often
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
        scaled = np.clip((index - first) / (last - first or 1e-3), 0, 1)
        return frequencies * (1 - scaled + scaled / self.factor)


@dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE: each frequency divided by a number of its own, one for short and one for long sequences (Ding et al.,
    arXiv:2402.13753; Phi-3, 2404.14219).

    Args:
        short, long: the divisors, one for each frequency. original: positions that a model was trained on before; a
            sequence with a position from there on takes `long`, all of it, others `short`.
        factor: how many times as far the model sees. attention_factor: of cosine and sine, whose square multiplies the
            scores; √(1 + ln(factor) / ln(original)) by default.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int = 4096
    factor: float = 32.0
    attention_factor: float | None = None

    def __post_init__(self):
        check_range(self, "[2, inf)", "original")
        check_range(self, "(0, inf)", "factor", "attention_factor")
        if len(self.short) != len(self.long) or min(self.short + self.long, default=0) <= 0:
            raise UserError(
                f"LongRopeScaling: short has {len(self.short)} divisors and long {len(self.long)}; both must have one "
                "for each rotated pair of a head, above 0"
            )

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1.0)) / math.log(self.original))

    @property
    def changes_at(self) -> int:
        return self.original

    def at(self, positions: Array, frequencies: np.ndarray, last: Array | None) -> Array:
        if len(self.short) != len(frequencies):
            raise UserError(
                f"LongRopeScaling: short and long have {len(self.short)} divisors; must have {len(frequencies)}, one "
                "for each rotated pair of a head"
            )
        last = jnp.max(positions, axis=1, keepdims=True) if last is None else last
        is_long = last[..., None] >= self.original
        short, long = (jnp.asarray(frequencies / np.asarray(by), jnp.float32) for by in (self.short, self.long))
        return jnp.where(is_long, long, short)
