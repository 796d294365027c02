"""New keys and values into their pages on a TPU: whole tiles of rows, read, changed and written back in place.

One row of a page is less than a tile, the least that a copy between HBM and VMEM moves. So the new tokens are laid out
in aligned groups of rows, one grid step each, and the page's other rows go back as they were.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.paged_attention.cache import Cache, stored
from axon.kernels.paged_attention.ragged import AttentionInputs

TILE_BYTES = 32
"""Rows of a tile times bytes of a number: 8 rows of float32, 16 of bfloat16, 32 of int8.

Of an array whose rows these do not divide, as 48 of int8, the compiler makes smaller tiles, of 8 rows.
"""


@dataclass(frozen=True)
class _Groups:
    """Aligned groups of a page's slots that get something new: `[first, last)` of `size` slots; none if it is padding.

    Args:
        pages, parts: of each group, `groups`, the page, and which of its groups of `size` slots.
        rows: the new token of each slot, `groups size`.
    """

    pages: Array
    parts: Array
    first: Array
    last: Array
    rows: Array


def write_tpu(cache: Cache, k: Array, v: Array, inputs: AttentionInputs, *, interpret: Any = False) -> Cache:
    """See `axon.kernels.paged_attention.write.write`; a padding row writes nothing."""
    (keys, key_scales), (values, value_scales) = stored(k, cache.keys.dtype), stored(v, cache.values.dtype)
    rows = math.gcd(cache.page_size, TILE_BYTES // cache.keys.dtype.itemsize)  # no group lies across two pages
    put = partial(_put, page_size=cache.page_size, interpret=interpret)
    new_keys, new_values = put((cache.keys, cache.values), (keys, values), _groups(inputs, k.shape[0], rows, cache))
    if cache.key_scales is None or cache.value_scales is None or key_scales is None or value_scales is None:
        return Cache(new_keys, new_values)
    # A page's scales lie along lanes, which no copy cuts: a whole page a step.
    pages = _groups(inputs, k.shape[0], cache.page_size, cache)
    scales = put((cache.key_scales, cache.value_scales), (key_scales, value_scales), pages)
    return Cache(new_keys, new_values, *scales)


def _groups(inputs: AttentionInputs, tokens: int, size: int, cache: Cache) -> _Groups:
    """Of n tokens from position s on: ⌊(s + n - 1) / size⌋ - ⌊s / size⌋ + 1 groups, no more than there are tokens."""
    lens = inputs.q_lens
    start = inputs.kv_lens - lens
    counts = jnp.where(lens > 0, (inputs.kv_lens - 1) // size - start // size + 1, 0)
    ends = jnp.cumsum(counts)
    room = min(tokens, tokens // size + 2 * min(tokens, inputs.sequences))
    index = jnp.arange(room, dtype=jnp.int32)
    real = index < ends[-1]
    owner = jnp.minimum(jnp.searchsorted(ends, index, side="right"), inputs.sequences - 1)
    position = (start[owner] // size + index - (ends - counts)[owner]) * size
    column = jnp.clip(position // cache.page_size, 0, inputs.page_table.shape[1] - 1)
    return _Groups(
        pages=jnp.where(real, inputs.page_table[owner, column], 0),
        parts=jnp.where(real, position % cache.page_size // size, 0),
        first=jnp.where(real, jnp.maximum(start[owner] - position, 0), 0),
        last=jnp.where(real, jnp.minimum(inputs.kv_lens[owner] - position, size), 0),
        rows=(inputs.cu_q_lens[owner] + position - start[owner])[:, None] + jnp.arange(size),
    )


def _put(
    cached: Sequence[Array], new: Sequence[Array], groups: _Groups, *, page_size: int, interpret: Any
) -> Sequence[Array]:
    """`pages kv_heads page_size …` arrays with the groups' rows from `tokens kv_heads …` ones."""
    count, size = groups.rows.shape
    laid = [jnp.swapaxes(a.at[groups.rows].get(mode="clip"), 1, 2) for a in new]
    scalars = [groups.pages, groups.parts, groups.first, groups.last]

    def block(array: Array, place: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, array.shape[1], size, *array.shape[3:]), place)

    def fresh(group, *_):
        return group, 0, 0, 0

    def page(group, pages, parts, *_):
        return pages[group], 0, parts[group], 0

    def cut(place, array):
        return lambda *args: place(*args)[: array.ndim]

    specs = [block(a, cut(page, a)) for a in cached]
    first = len(scalars) + len(laid)
    return pl.pallas_call(
        _put_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count,),
            in_specs=[*(block(a, cut(fresh, a)) for a in laid), *specs],
            out_specs=specs,
        ),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in cached],
        input_output_aliases={first + i: i for i in range(len(cached))},
        interpret=interpret,
        name="paged_attention_write",
    )(*(a.astype(jnp.int32) for a in scalars), *laid, *cached)


def _put_kernel(pages: Any, parts: Any, first: Any, last: Any, *refs: Any) -> None:
    group = pl.program_id(0)
    third = len(refs) // 3
    for new, old, out in zip(refs[:third], refs[third : 2 * third], refs[2 * third :], strict=True):
        slot = lax.broadcasted_iota(jnp.int32, out.shape, 2)
        changed = (slot >= first[group]) & (slot < last[group])
        wide = jnp.int32 if jnp.issubdtype(out.dtype, jnp.integer) else jnp.float32
        out[...] = jnp.where(changed, new[...].astype(wide), old[...].astype(wide)).astype(out.dtype)
