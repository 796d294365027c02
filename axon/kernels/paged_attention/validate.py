"""Checks of a call before anything runs: shapes that do not match, and invalid constants."""

import jax.numpy as jnp
from jax import Array

from axon.errors import UserError
from axon.kernels.paged_attention.cache import Cache, quantised
from axon.kernels.paged_attention.ragged import AttentionInputs


def validate(q: Array, k: Array, v: Array, cache: Cache, inputs: AttentionInputs) -> None:
    """Raises `UserError` where the arrays do not match, with their shapes and what was expected."""
    _validate_tokens(q, k, v)
    _validate_cache(cache)
    cached = (cache.kv_heads, cache.head_dim)
    _demand(k.shape[1:] == cached, f"new keys have (kv_heads, head_dim) {k.shape[1:]}, the cache's are {cached}")
    _validate_ragged(inputs)
    _validate_heads(q.shape[1], inputs, inputs.page_table.shape[1] * cache.page_size)


def validate_constants(window: int | None, soft_cap: float | None) -> None:
    """Raises `UserError` for a constant out of range."""
    _demand(window is None or window >= 1, f"window is {window}; a query sees at least itself, so give 1 or more")
    _demand(soft_cap is None or soft_cap > 0, f"soft_cap is {soft_cap}; give a number above 0, or None for no cap")


def _validate_tokens(q: Array, k: Array, v: Array) -> None:
    _demand(q.ndim == 3, f"q is tokens heads head_dim, not of shape {q.shape}")
    _demand(k.ndim == 3, f"k is tokens kv_heads head_dim, not of shape {k.shape}")
    _demand(k.shape == v.shape, f"k and v differ in shape: {k.shape} and {v.shape}")
    _demand(q.shape[0] == k.shape[0], f"{q.shape[0]} rows of queries, but {k.shape[0]} of new keys")
    _demand(q.shape[0] > 0, "no rows; give one padding row at least")
    _demand(q.shape[2] == k.shape[2], f"queries have head_dim {q.shape[2]}, keys {k.shape[2]}")
    _demand(q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads are not a multiple of {k.shape[1]} kv_heads")


def _validate_cache(cache: Cache) -> None:
    keys, values = cache.keys, cache.values
    _demand(keys.ndim == 4, f"a cache's keys are pages kv_heads page_size head_dim, not of shape {keys.shape}")
    same = (keys.shape, keys.dtype) == (values.shape, values.dtype)
    _demand(same, f"a cache's keys are {keys.dtype}{keys.shape}, its values {values.dtype}{values.shape}")
    for name, scales in (("key_scales", cache.key_scales), ("value_scales", cache.value_scales)):
        if not quantised(keys.dtype):
            _demand(scales is None, f"a {keys.dtype} cache has no {name}; make one with Cache.empty")
            continue
        fits = scales is not None and (scales.shape, scales.dtype) == (keys.shape[:3], jnp.float32)
        found = None if scales is None else f"{scales.dtype}{scales.shape}"
        _demand(fits, f"a {keys.dtype} cache has float32{keys.shape[:3]} {name}, not {found}; use Cache.empty")


def _validate_ragged(inputs: AttentionInputs) -> None:
    lens, table, bounds = inputs.kv_lens, inputs.page_table, inputs.cu_q_lens
    ranks = {"kv_lens": (lens, 1), "page_table": (table, 2), "cu_q_lens": (bounds, 1)}
    for name, (array, rank) in ranks.items():
        _demand(array.ndim == rank, f"{name} has shape {array.shape}; {rank} dimensions were expected")
        _demand(array.dtype == jnp.int32, f"{name} is {array.dtype}; int32 was expected")
    sequences = lens.shape[0]
    _demand(sequences > 0, "no sequences; give one at least, of length 0 if need be")
    _demand(table.shape[0] == sequences, f"{sequences} kv_lens, but {table.shape[0]} rows of page_table")
    _demand(table.shape[1] > 0, "page_table has no columns: no sequence has room for a page")
    expected = sequences + 1
    _demand(bounds.shape[0] == expected, f"{sequences} kv_lens want {expected} cu_q_lens, not {bounds.shape[0]}")


def _validate_heads(heads: int, inputs: AttentionInputs, positions: int) -> None:
    """What there is of each head; `positions`: how many a sequence has room for."""
    bias = inputs.distance_bias
    for name, x in (("sinks", inputs.sinks), ("alibi_slopes", inputs.alibi_slopes)):
        shape = (heads,) if x is None else x.shape
        _demand(shape == (heads,), f"{name} are of shape {shape}; there are {heads} heads, one number each")
    if bias is not None:
        expected = (heads, 2 * positions - 1)
        _demand(
            bias.shape == expected,
            f"distance_bias is of shape {bias.shape}; must be {expected}, for {heads} heads and {positions} positions",
        )


def _demand(fine: bool, message: str) -> None:
    if not fine:
        raise UserError(f"paged_attention: {message}")
