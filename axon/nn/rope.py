"""Rotary position embedding (Su et al., arXiv:2104.09864)."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon.axes import platform
from axon.checks import check_range
from axon.errors import UserError
from axon.nn.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    YarnScaling,
)

Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True)
class Rope:
    """The frequencies at which `positions` rotate: theta^(−2i/width), scaled.

    `fraction`: of the elements of a head, how many are rotated, the first `width` of them (Phi-4-mini).
    """

    theta: float = 10000.0
    scaling: Scaling | None = None
    fraction: float = 1.0

    def __post_init__(self):
        check_range(self, "(0, inf)", "theta")
        check_range(self, "(0, 1]", "fraction")
        if self.theta == 1 and isinstance(self.scaling, YarnScaling):
            raise UserError("Rope.theta is 1: all frequencies are the same, and YarnScaling has none to choose from")

    @property
    def score_scale(self) -> float:
        """What latent attention multiplies scores by, besides what the scaling does to cosine and sine."""
        return 1.0 if self.scaling is None else self.scaling.score_scale

    def width(self, head_dim: int) -> int:
        """How many elements of a head are rotated. Raises `UserError` for an odd number."""
        width = int(head_dim * self.fraction)
        if width % 2 or not width:
            raise UserError(
                f"Rope.fraction {self.fraction:g} of head_dim {head_dim} is {width} elements; must be even, as rotary "
                "embedding rotates pairs"
            )
        return width

    def angles(self, positions: Array, head_dim: int, last: Array | None = None) -> "Angles":
        """The angles of `positions[batch seq]`; `last[batch seq]`: the last position of each one's sequence, by default
        the row's."""
        width = self.width(head_dim)
        frequencies = self.theta ** (-np.arange(0, width, 2) / width)
        scaled = frequencies if self.scaling is None else self.scaling.at(positions, frequencies, last)
        cos, sin = _cos_and_sin(positions[..., None].astype(jnp.float32) * scaled.astype(np.float32))
        if self.scaling is not None and self.scaling.magnitude != 1:
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
    """Cosine and sine, `batch seq width/2` float32, by which `rope` rotates `width` elements of heads of `head_dim`."""

    rope: Rope
    head_dim: int
    cos: Array
    sin: Array


def rotate(x: Array, angles: Angles, interleaved: bool = False) -> Array:
    """`x[batch seq heads head_dim]` rotated by `angles`; pair i is of elements i and i + width/2, and what follows the
    first `width` elements stays as it is.

    `interleaved`: of elements 2i and 2i + 1 instead (DeepSeek), which come out at i and i + width/2: in the same order
    for queries and keys, so that their products do not see it.
    """
    cos, sin = (a[:, :, None, :].astype(x.dtype) for a in (angles.cos, angles.sin))
    if platform() == "tpu":
        return _rotate_uncut(x, cos, sin, interleaved)
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        rotated = rotate(x[..., :width], angles, interleaved)
        return jnp.concatenate([rotated, x[..., width:]], axis=-1)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rotate_uncut(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """As `rotate`, with no head cut in halves: x·cos + x̂·sin, where x̂ = (−second, first) is a product with −1, 0 and 1.

    Halves of a head fill half of a TPU's lanes, so XLA has positions there instead, and copies all queries and keys
    into the order of the attention kernel and back. The products are exact.
    """
    head_dim, half = x.shape[-1], cos.shape[-1]
    places = np.arange(head_dim)
    pairs = places[: 2 * half]
    first, second = (pairs[0::2], pairs[1::2]) if interleaved else (pairs[:half], pairs[half:])
    quarter_turn = np.zeros((head_dim, head_dim))
    quarter_turn[second, pairs[:half]], quarter_turn[first, pairs[half:]] = -1, 1
    rest = [(0, 0)] * 3 + [(0, head_dim - 2 * half)]
    cos = jnp.pad(jnp.concatenate([cos, cos], axis=-1), rest, constant_values=1)
    sin = jnp.pad(jnp.concatenate([sin, sin], axis=-1), rest)
    order = np.concatenate([first, second, places[2 * half :]])
    ordered = _product(x, np.eye(head_dim)[:, order]) if interleaved else x
    return ordered * cos + _product(x, quarter_turn) * sin


def _product(x: Array, matrix: np.ndarray) -> Array:
    return jnp.matmul(x, jnp.asarray(matrix, x.dtype), precision=lax.Precision.HIGHEST)
