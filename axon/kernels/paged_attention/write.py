"""New keys and values into their pages, by a scatter."""

import dataclasses

from jax import Array

from axon.kernels.paged_attention.cache import Cache, stored
from axon.kernels.paged_attention.ragged import AttentionInputs, Places


def write(cache: Cache, k: Array, v: Array, inputs: AttentionInputs, where: Places) -> Cache:
    """The cache with the new tokens `k, v[tokens kv_heads head_dim]` in it; in place where it was donated."""
    pages, slots = where.pages(inputs, cache.page_size)

    def put(cached: Array | None, new: Array | None) -> Array | None:
        return cached if cached is None or new is None else cached.at[pages, :, slots].set(new)

    (keys, key_scales), (values, value_scales) = stored(k, cache.keys.dtype), stored(v, cache.values.dtype)
    return dataclasses.replace(
        cache,
        keys=put(cache.keys, keys),
        values=put(cache.values, values),
        key_scales=put(cache.key_scales, key_scales),
        value_scales=put(cache.value_scales, value_scales),
    )
