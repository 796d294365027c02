"""Stochastic rounding: up or down with the chances that make the mean exact, so that small steps add up."""

import jax.numpy as jnp
from jax import Array, lax

from axon import axes
from axon.axes import Names

MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
"""Of a mixing of 32 bits: each bit of the result depends on all (Wellons, https://github.com/skeeto/hash-prospector)."""


def rounded_to_bfloat16(x: Array, words: Array) -> Array:
    """float32 as bfloat16: up where the bits to be dropped exceed the lower 16 of `words`; not finite as it is."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (words & 0xFFFF)
    up = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), up, x.astype(jnp.bfloat16))


def rounded_to_e2m1(x: Array) -> Array:
    """float32 as a number of e2m1 below or above, by bits that follow from `x`; beyond 6 as it is."""
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    part = size / step
    chance = (_mixed(lax.bitcast_convert_type(x, jnp.uint32)) >> 8).astype(jnp.float32) * 2.0**-24
    up = jnp.floor(part) + (part - jnp.floor(part) > chance)
    return jnp.where(size < 6, jnp.sign(x) * up * step, x)


def random_words(seed: Array, names: Names, shape: tuple[int, ...], kind: str) -> Array:
    """32 random bits for each element of an array with these axes, which follow from `seed`, uint32, and its indices:
    the same on every layout, each device making its own."""
    words = _mixed(seed)
    for name, size in zip(names, shape, strict=True):
        indices = axes.shard(jnp.arange(size, dtype=jnp.uint32), name, kind)
        words = _mixed((words[..., None] + jnp.uint32(0x9E3779B9)) ^ indices)
    return words


def _mixed(words: Array) -> Array:
    for shift, multiplier in zip((16, 15), MULTIPLIERS, strict=True):
        words = (words ^ (words >> shift)) * jnp.uint32(multiplier)
    return words ^ (words >> 16)
