"""Attention's sums over pages as products with copies: `batch kv_heads rows n` by `batch kv_heads n columns`."""

from functools import reduce
from operator import add

import jax.numpy as jnp
from jax import Array

from axon.axes import platform

TERMS, COLUMNS = 128, 64
"""XLA for CPUs adds up to so many terms in one order for any number of rows but one, if there are so many columns: of
other products it takes sums in parts, or exchanges rows and columns, where the number of rows is in favour."""


def scores(q: Array, keys: Array, pages: Array) -> Array:
    """`blocks kv_heads rows (pages page_size)` of `q[blocks kv_heads rows head_dim]`."""
    return product(q, gather(keys, pages).astype(q.dtype).swapaxes(2, 3))


def sums(weights: Array, values: Array, pages: Array) -> Array:
    """`blocks kv_heads rows head_dim` of `weights[blocks kv_heads rows (pages page_size)]`."""
    return product(weights, gather(values, pages).astype(weights.dtype))


def total(weights: Array, values: Array) -> Array:
    """`blocks kv_heads rows`: the weights' sum."""
    return weights.sum(axis=-1)


def gather(cached: Array, pages: Array) -> Array:
    """`blocks pages` of `pages kv_heads page_size …` → `blocks kv_heads (pages page_size) …`, in that order at once."""
    kv_heads, size, *rest = cached.shape[1:]
    index = pages[:, None, :] * kv_heads + jnp.arange(kv_heads)[:, None]
    return cached.reshape(-1, size, *rest).at[index].get(mode="clip").reshape(len(pages), kv_heads, -1, *rest)


def product(a: Array, b: Array) -> Array:
    """`batch kv_heads rows columns`; on a CPU a row's bits do not depend on how many rows there are.

    One row is computed twice, `COLUMNS` columns at once, and sums of more terms than `TERMS` are sums of such sums.
    """
    if platform() != "cpu":
        return _product(a, b)
    rows, columns = a.shape[2], b.shape[3]
    a = jnp.repeat(a, 2, axis=2) if rows == 1 else a
    b = jnp.pad(b, (*[(0, 0)] * 3, (0, -columns % COLUMNS)))
    some = [_of_columns(a, part) for part in jnp.split(b, b.shape[3] // COLUMNS, axis=3)]
    return jnp.concatenate(some, axis=3)[:, :, :rows, :columns]


def _of_columns(a: Array, b: Array) -> Array:
    cuts = [*range(TERMS, a.shape[3], TERMS)]
    parts = zip(jnp.split(a, cuts, axis=3), jnp.split(b, cuts, axis=2), strict=True)
    return reduce(add, (_product(*part) for part in parts))


def _product(a: Array, b: Array) -> Array:
    return jnp.einsum("bkrn,bknc->bkrc", a, b)
