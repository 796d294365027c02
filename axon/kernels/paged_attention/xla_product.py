"""The products of attention over pages in plain XLA: `batch kv_heads rows n` and `batch kv_heads n columns`."""

import jax.numpy as jnp
from jax import Array

from axon.kernels.choice import platform


def product(a: Array, b: Array) -> Array:
    """`batch kv_heads rows columns`; on a CPU a row's bits do not depend on how many rows there are.

    XLA for CPUs has several ways to multiply small matrices, each with another order of its sums, and takes one or the
    other by their shapes. A sum of scaled rows of `b` has one order, and is one loop: as fast as those for one row.
    """
    if platform() != "cpu":
        return jnp.einsum("bkrn,bknc->bkrc", a, b)
    total = a[..., 0, None] * b[..., None, 0, :]
    for i in range(1, a.shape[-1]):
        total += a[..., i, None] * b[..., None, i, :]
    return total
