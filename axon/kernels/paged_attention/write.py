"""New keys and values into their pages, by a scatter."""

import jax
from jax import Array

from axon.kernels.paged_attention.cache import Cache, new_tokens
from axon.kernels.paged_attention.ragged import AttentionInputs, Places


def write(cache: Cache, k: Array, v: Array, inputs: AttentionInputs, where: Places) -> Cache:
    """The cache with the new tokens `k, v[tokens kv_heads head_dim]` in it; in place where it was donated."""
    pages, slots = where.pages(inputs, cache.page_size)
    put = lambda cached, new: cached.at[pages, :, slots].set(new)  # noqa: E731
    return jax.tree.map(put, cache, new_tokens(cache, k, v))
