"""A Hadamard matrix with random signs: what it mixes has no outliers left, and is rounded with less error."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import hadamard

SIGNS = np.where(np.random.default_rng(0).random(256) < 0.5, -1, 1).astype(np.float32)
"""Signs that a block's numbers are multiplied by before they are mixed."""


def mixed(x: Array, block: int) -> Array:
    """`… width`, each `block` of neighbours along the last axis, a power of two up to 256, times the matrix; float32.

    The matrix is orthogonal: a product of two mixed vectors is that of the plain ones. Its elements are ±1, exact in
    the dtype of `x`, and the root of `block` is divided by afterwards.
    """
    matrix = jnp.asarray(SIGNS[:block, None] * hadamard(block, jnp.float32), x.dtype)
    blocks = x.reshape(*x.shape[:-1], -1, block)
    found = jnp.matmul(blocks, matrix, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return found.reshape(x.shape) * (1 / math.sqrt(block))
