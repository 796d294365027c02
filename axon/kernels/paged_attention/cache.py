"""A paged cache of keys and values (Kwon et al., PagedAttention, arXiv:2309.06180), plain or quantised.

A page has `page_size` tokens of one sequence, one head's tokens contiguous, so that a head's keys are a matrix that a
matmul unit takes without a copy. Page 0 belongs to no sequence: padding writes there.

All values are finite, in pages that no sequence has too, so that a weight of 0 hides what a query does not see.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from axon.errors import UserError
from axon.kernels.paged_attention.ragged import AttentionInputs, Places

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The quantised types, and the largest number that each of them has."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of many sequences, in pages; a pytree, to be donated to a program that returns it updated.

    Args:
        keys, values: `pages kv_heads page_size head_dim`.
        key_scales, value_scales: float32 `pages kv_heads page_size`, of a quantised cache; a token's head is its
            numbers times its scale. None for a plain one.
    """

    keys: Array
    values: Array
    key_scales: Array | None = None
    value_scales: Array | None = None

    @staticmethod
    def empty(pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: DTypeLike) -> "Cache":
        """A cache of zeros; int8 and float8_e4m3fn ones come with scales. Raises `UserError` without a page to use."""
        if pages < 2 or min(kv_heads, page_size, head_dim) < 1:
            raise UserError(
                f"paged cache: {pages} pages of {kv_heads} kv_heads × {page_size} tokens × {head_dim} head_dim; "
                "give 2 pages or more (page 0 is padding's) and sizes of 1 or more"
            )
        shape = (pages, kv_heads, page_size, head_dim)
        if not quantised(dtype):
            return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        scales = jnp.zeros(shape[:3], jnp.float32)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), scales, jnp.copy(scales))

    @property
    def pages(self) -> int:
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]


def quantised(dtype: DTypeLike) -> bool:
    """Whether a cache of this type has scales."""
    return jnp.dtype(dtype).name in LARGEST


def new_tokens(cache: Cache, k: Array, v: Array) -> Cache:
    """New keys and values `tokens kv_heads head_dim` as the cache keeps them, their scales `tokens kv_heads`.

    Of a head whose value is not finite in that type, the value is 0 and the key NaN: queries that see the token have
    NaN for their scores, and the others nothing of it.
    """
    value = v.astype(jnp.float32 if quantised(cache.values.dtype) else cache.values.dtype)
    finite = jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
    keys, key_scales = stored(jnp.where(finite, k, jnp.nan), cache.keys.dtype)
    values, value_scales = stored(jnp.where(finite, value, 0), cache.values.dtype)
    return Cache(keys, values, key_scales, value_scales)


def stored(x: Array, dtype: DTypeLike) -> tuple[Array, Array | None]:
    """New keys or values `tokens kv_heads head_dim` as the cache keeps them, and their scales `tokens kv_heads`.

    Symmetric: the largest magnitude of a token's head becomes the largest number of the type.
    """
    if not quantised(dtype):
        return x.astype(dtype), None
    largest = LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / largest
    x = jnp.clip(x / jnp.where(scales == 0, 1, scales)[..., None], -largest, largest)
    return (jnp.round(x) if jnp.dtype(dtype) == jnp.int8 else x).astype(dtype), scales


def write(cache: Cache, k: Array, v: Array, inputs: AttentionInputs, where: Places) -> Cache:
    """The cache with the new tokens `k, v[tokens kv_heads head_dim]` in it; in place where it was donated."""
    pages, slots = where.pages(inputs, cache.page_size)
    put = lambda cached, new: cached.at[pages, :, slots].set(new)  # noqa: E731
    return jax.tree.map(put, cache, new_tokens(cache, k, v))
