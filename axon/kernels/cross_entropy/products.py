"""The two products that a block's gradient needs, and where on a CPU one of them is cut."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from axon.axes import platform

CPU_PART = 2**24
"""Bytes of the head's gradient, about, that a CPU adds to at a time: the product that is added is an array there."""


def begun_gradient(head: Array, accumulate: Any, trained: bool) -> Array | None:
    """What a head's gradient begins as, `embed vocab` in `accumulate`: zeros, or None for a head that is frozen."""
    return jnp.zeros(head.shape, accumulate) if trained else None


def add_gradients(
    dhead: Array | None, x: Array, head: Array, dlogits: Array, dx_dtype: Any
) -> tuple[Array | None, Array]:
    """`(dhead + xᵀ·dlogits, dlogits·headᵀ)`, the products' operands in the dtype of `x`, the second in `dx_dtype`; the
    first is not made where `dhead` is None."""
    dlogits = dlogits.astype(x.dtype)
    dx = lax.dot_general(dlogits, head, (((1,), (1,)), ((), ())), preferred_element_type=dx_dtype)
    return None if dhead is None else _add_product(dhead, x, dlogits), dx


def _add_product(dhead: Array, x: Array, dlogits: Array) -> Array:
    """`dhead + xᵀ·dlogits`. On a CPU in parts of the columns: the product is an array there before it is added.

    There `x` is transposed first, behind a barrier without which XLA would fold the transpose into the product: its
    CPU matmul is half as fast, or two thirds, with a transposed left operand (384 × 512 × 8,192 and near, jax 0.10.2).
    """
    parts = _column_parts(dhead)
    width = dhead.shape[1] // parts
    x, tokens = (lax.optimization_barrier(x.T), 1) if platform() == "cpu" else (x, 0)

    def product(dlogits):
        return lax.dot_general(x, dlogits, (((tokens,), (0,)), ((), ())), preferred_element_type=dhead.dtype)

    def add(i, dhead):
        own = product(lax.dynamic_slice_in_dim(dlogits, i * width, width, 1))
        own += lax.dynamic_slice_in_dim(dhead, i * width, width, 1)
        return lax.dynamic_update_slice_in_dim(dhead, own, i * width, 1)

    return dhead + product(dlogits) if parts == 1 else lax.fori_loop(0, parts, add, dhead)


def _column_parts(dhead: Array) -> int:
    """Into how many parts to cut the head's columns; into one where they cannot be cut evenly."""
    wanted = -(-dhead.size * dhead.dtype.itemsize // CPU_PART) if platform() == "cpu" else 1
    return next((n for n in range(wanted, 2 * wanted) if dhead.shape[1] % n == 0), 1)
