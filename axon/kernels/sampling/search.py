"""The largest float32 for which something holds, found exactly and without a sort: one bit of it a step.

Floats are in the order of their bits, read as integers, once those of negative ones are inverted. A property that
holds up to some float and not beyond is so decided by 32 questions.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

STEPS = 32

DIGIT = 4
"""Bits of a step of `search_digits`."""

_LOWEST = np.int32(-(2**31))
_SIGNLESS = np.int32(2**31 - 1)
_INFINITY = np.int32(np.float32(np.inf).view(np.int32))
_NORMAL = np.int32(2**23)


def search(holds: Callable[[Array], Array], shape: tuple[int, ...], steps: Array | int = STEPS) -> Array:
    """The largest float32 of which `holds` (float32 → booleans, both of `shape`), from −inf to inf.

    Whatever holds must hold of all smaller ones too, and is taken to hold of −inf. With 0 steps: −inf.
    """

    def step(n, found):
        tried = found ^ (jnp.int32(1) << (STEPS - 1 - n))
        return jnp.where(holds(as_float(tried)), tried, found)

    return as_float(lax.fori_loop(0, steps, step, jnp.full(shape, _LOWEST)))


def search_digits(hold: Callable[[list[Array]], list[Array]], shape: tuple[int, ...]) -> Array:
    """As `search`, four bits a step: 8 steps, each of which asks of 15 floats at once which of them hold.

    For GPUs, where a step costs the launches of its kernels, and as many bytes for 15 floats as for one.
    """

    def step(n, found):
        shift = STEPS - DIGIT * (n + 1)
        tried = [found + (jnp.int32(digit) << shift) for digit in range(1, 2**DIGIT)]
        digit = sum(held.astype(jnp.int32) for held in hold([as_float(index) for index in tried]))
        return found + (digit << shift)

    return as_float(lax.fori_loop(0, STEPS // DIGIT, step, jnp.full(shape, _LOWEST)))


def as_float(index: Array) -> Array:
    """The float32 at this place in their order, 0.0 at 0; −inf and inf for places beyond them (NaNs).

    0.0 for subnormal floats too, as XLA compares them on CPUs and TPUs.
    """
    index = jnp.where((index >= -_NORMAL) & (index < _NORMAL), 0, jnp.clip(index, ~_INFINITY, _INFINITY))
    return lax.bitcast_convert_type(jnp.where(index < 0, index ^ _SIGNLESS, index), jnp.float32)
