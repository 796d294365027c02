"""The grouped product by its formula: every row by every group's weight, of which its own group's is selected."""

import jax.numpy as jnp
from jax import Array


def grouped_matmul_reference(x: Array, w: Array, sizes: Array) -> Array:
    """See `axon.kernels.grouped_matmul.grouped_matmul`; in float32 at least, and differentiated by JAX."""
    out = x.dtype
    wide = jnp.promote_types(x.dtype, jnp.float32)
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])[:, None]
    own = (row >= ends - sizes) & (row < ends)  # rows groups
    x = jnp.where(row < ends[-1], x, 0)  # rows of no group may hold anything, and reach no gradient
    every = jnp.einsum("re,geo->rgo", x.astype(wide), w.astype(wide))
    return jnp.sum(jnp.where(own[:, :, None], every, 0), axis=1).astype(out)
