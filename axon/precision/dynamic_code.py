"""The dynamic code: 8 bits for numbers of seven decades, in blocks that share a scale (Dettmers et al.,
arXiv:2110.02861, section 2)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.precision.formats import largest_magnitudes, spread

DECADES = 7
"""The numbers are the middles of even steps: of 2ⁱ between a tenth and the whole of 10^(i − 6), for i = 0 … 6, twice as
many where there is no sign; and 0 and 1."""


class Blocks(NamedTuple):
    """An array in 8 bits: codes of its shape, and along each axis as many scales as there are blocks.

    Codes are int8 for numbers of either sign, uint8 for those of 0 and more.
    """

    codes: Any
    scales: Any  # float32: the largest magnitude of each block


def encoded(x: Array, counts: tuple[int, ...], signed: bool) -> Blocks:
    """`x` in so many even blocks along each axis; a block that is not finite does not become so.

    Without `signed`, `x` is 0 or more, and only 0 becomes 0: what is divided by its root stays bounded.
    """
    scales = largest_magnitudes(x, counts)
    part = jnp.abs(x) / jnp.maximum(spread(scales, x.shape), jnp.finfo(jnp.float32).tiny)
    if not signed:
        return Blocks(jnp.where(part == 0, 0, _step(part, 1) - 1).astype(jnp.uint8), scales)
    step = jnp.where(part < 0.275 * 10.0 ** (1 - DECADES), 0, _step(part, 0))
    code = jnp.where(x < 0, -jnp.minimum(step, 127), jnp.where(step == 128, -128, step))  # there is a 1, and no −1
    return Blocks(code.astype(jnp.int8), scales)


def decoded(blocks: Blocks) -> Array:
    """The numbers that blocks stand for, float32."""
    codes = blocks.codes.astype(jnp.int32)
    if blocks.codes.dtype == jnp.uint8:
        numbers = jnp.where(codes == 0, 0.0, _middle(codes + 1, 1))
    else:
        numbers = jnp.where(codes == -128, 1.0, jnp.sign(codes) * _middle(jnp.abs(codes), 0))
    return numbers * spread(blocks.scales, codes.shape)


def _step(part: Array, more: int) -> Array:
    """The nearest of the steps, counted so that those of the i-th decade begin at 2^(i + more); the next after the last
    is 1."""
    lowest = [10.0 ** (i - 6) * (0.1 + 0.18 / 2 ** (i + more)) for i in range(1, DECADES)]  # between two decades' steps
    decade: Any = sum((part >= low).astype(jnp.int32) for low in lowest)
    steps = jnp.left_shift(1, decade + more)
    step = jnp.floor((part * _power(10.0, DECADES - 1 - decade) - 0.1) / 0.9 * steps).astype(jnp.int32)
    most = 2 ** (DECADES + more)
    return jnp.where(part > 1 - 0.45 / most, most, steps + jnp.clip(step, 0, steps - 1))


def _middle(step: Array, more: int) -> Array:
    """The number of a step."""
    decade: Any = sum((step >= 2 ** (i + more)).astype(jnp.int32) for i in range(1, DECADES))
    steps = jnp.left_shift(1, decade + more)
    middle = (0.1 + 0.9 * (step - steps + 0.5) / steps) * _power(0.1, DECADES - 1 - decade)
    return jnp.where(step == 2 ** (DECADES + more), 1.0, middle)


def _power(base: float, exponent: Array) -> Array:
    """`base` to an exponent of 0 to 7, without a table: one would be looked up element by element."""
    factors = [jnp.where(exponent & 2**bit, base ** (2**bit), 1.0) for bit in range(3)]
    return factors[0] * factors[1] * factors[2]
