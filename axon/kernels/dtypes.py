"""Dtypes that several kernels know."""

import jax.numpy as jnp

EIGHT_BITS = (jnp.int8, jnp.float8_e4m3fn)
"""Of values that stand for wider ones, with scales."""
