"""Codes of 4 bits: sixteen numbers, two codes in a byte, and a scale for each block along an axis."""

import functools
from statistics import NormalDist
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Codebook(NamedTuple):
    """What the codes 0 … 15 stand for, times a block's scale, of which its largest magnitude is `most`."""

    numbers: tuple[float, ...]
    most: float = 1.0


@functools.cache
def normal_float() -> Codebook:
    """NF4 (Dettmers et al., arXiv:2305.14314, section 3): quantiles of the standard Gaussian, over the largest; 8 of 0
    and more, 8 below, both with the chance of 0 and an end of 1 − (1 / 32 + 1 / 30) / 2."""
    end = 1 - (1 / 32 + 1 / 30) / 2
    upper = [NormalDist().inv_cdf(p) for p in np.linspace(end, 0.5, 9)[:-1]]
    lower = [-NormalDist().inv_cdf(p) for p in np.linspace(end, 0.5, 8)[:-1]]
    numbers = np.sort([*lower, 0.0, *upper])
    return Codebook(tuple((numbers / numbers[-1]).tolist()))


INT4 = Codebook(tuple(float(n) for n in range(-8, 8)), most=7.0)
"""−8 … 7, of which −7 … 7 are used, so that there is one of either sign."""


def packed(x: Array, axis: int, block: int, book: Codebook) -> tuple[Array, Array]:
    """The nearest codes of a book whose numbers ascend, as `paired`; and the scales, one for each `block` of neighbours
    along `axis` (negative)."""
    blocks = split(x.astype(jnp.float32), axis, block)
    scales = jnp.max(jnp.abs(blocks), axis=axis, keepdims=True) / book.most
    part = blocks / jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)
    middles = [(low + high) / 2 for low, high in zip(book.numbers, book.numbers[1:], strict=False)]
    codes = sum((part > middle).astype(jnp.uint8) for middle in middles)
    return paired(jnp.reshape(codes, x.shape), axis), jnp.squeeze(scales, axis)


def paired(codes: Array, axis: int) -> Array:
    """Two neighbours along `axis` (negative) in a byte, the first in its lower half."""
    pairs = split(codes, axis, 2)
    first, second = (jnp.take(pairs, i, axis=axis) for i in range(2))
    return first | (second << 4)


def unpacked(codes: Array, scales: Array, axis: int, book: Codebook) -> Array:
    """The numbers that packed codes stand for, float32."""
    at = codes.ndim + axis
    pairs = jnp.expand_dims(codes, at + 1) >> jnp.arange(0, 8, 4, dtype=codes.dtype).reshape(2, *(1,) * (-axis - 1))
    numbers = _merged(_number(pairs & 15, book), axis)  # elementwise up to here: two halves joined would be copies
    blocks = split(numbers, axis, numbers.shape[axis] // scales.shape[axis])
    return _merged(blocks * jnp.expand_dims(scales, axis), axis)


def _number(codes: Array, book: Codebook) -> Array:
    """What codes stand for, chosen bit by bit: a table would be looked up element by element.

    It is chosen by operations on bits, whose constants stay scalars. Those of `jnp.where` become arrays as large as the
    weight, which do not depend on it: so they are made once, outside of a loop over layers, and kept.
    """
    found: list[Any] = np.array(book.numbers, np.float32).view(np.int32).tolist()
    for bit in range(4):
        is_set = -((codes >> bit) & 1).astype(jnp.int32)  # all bits, or none
        found = [even ^ (is_set & (even ^ odd)) for even, odd in zip(found[::2], found[1::2], strict=True)]
    return lax.bitcast_convert_type(found[0], jnp.float32)


def split(x: Array, axis: int, length: int) -> Array:
    """`axis` (negative) as even parts and what is in each, which comes last in its place."""
    at = x.ndim + axis
    return x.reshape(*x.shape[:at], x.shape[at] // length, length, *x.shape[at + 1 :])


def _merged(x: Array, axis: int) -> Array:
    """The reverse of `split`."""
    at = x.ndim + axis
    return x.reshape(*x.shape[: at - 1], x.shape[at - 1] * x.shape[at], *x.shape[at + 1 :])
