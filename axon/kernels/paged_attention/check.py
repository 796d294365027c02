"""A checked mode: what the values of a batch must obey, which no shape shows, as `checkify` checks.

`paged_attention(..., checked=True)` inside a function that `checkify` makes functional:

    checked = jax.jit(checkify.checkify(step))       # step calls paged_attention(..., checked=True)
    error, result = checked(...)
    error.throw()                                    # JaxRuntimeError that says which sequence, and the numbers

Without `checkify.checkify` around it, JAX refuses to compile the checks.
"""

import jax.numpy as jnp
from jax import Array
from jax.experimental import checkify

from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.ragged import AttentionInputs


def check(tokens: int, cache: Cache, inputs: AttentionInputs) -> None:
    """Adds the checks to the program that is being traced."""
    _check_rows(tokens, inputs)
    _check_lengths(cache, inputs)
    _check_pages(cache, inputs)


def _check_rows(tokens: int, inputs: AttentionInputs) -> None:
    bounds = inputs.cu_q_lens
    checkify.check(bounds[0] == 0, "cu_q_lens starts at {first}, not at 0", first=bounds[0])
    wrong = inputs.q_lens < 0
    _no_sequence(wrong, "sequence {at}: cu_q_lens fall, by {value}", -inputs.q_lens)
    last = "cu_q_lens end at {last}, past the last of {tokens} rows"
    checkify.check(bounds[-1] <= tokens, last, last=bounds[-1], tokens=jnp.int32(tokens))


def _check_lengths(cache: Cache, inputs: AttentionInputs) -> None:
    capacity = inputs.page_table.shape[1] * cache.page_size
    lens = inputs.kv_lens
    _no_sequence(lens > capacity, f"sequence {{at}}: kv_len {{value}} is past its page table's {capacity} tokens", lens)
    short = lens < inputs.q_lens
    _no_sequence(short, "sequence {at}: kv_len {value} is less than its queries; it counts the new tokens", lens)


def _check_pages(cache: Cache, inputs: AttentionInputs) -> None:
    """Used entries point into the cache, never at padding's page; and no page is written by two sequences."""
    table, size = inputs.page_table, cache.page_size
    column = jnp.arange(table.shape[1])
    used = column * size < inputs.kv_lens[:, None]
    wrong = used & ((table < 1) | (table >= cache.pages))
    outside = jnp.take_along_axis(table, jnp.argmax(wrong, axis=1)[:, None], axis=1)[:, 0]
    message = f"sequence {{at}}: its page table points at page {{value}}; pages 1 to {cache.pages - 1} hold tokens"
    _no_sequence(wrong.any(axis=1), message, outside)
    first = (inputs.kv_lens - inputs.q_lens) // size
    written = used & (column >= first[:, None]) & (inputs.q_lens > 0)[:, None]
    pages = jnp.where(written & ~wrong, table, cache.pages)
    writers = jnp.zeros(cache.pages, jnp.int32).at[pages].add(1, mode="drop")
    at = jnp.argmax(writers)
    checkify.check(writers[at] <= 1, "page {page} is written by {count} sequences", page=at, count=writers[at])


def _no_sequence(wrong: Array, message: str, values: Array) -> None:
    at = jnp.argmax(wrong)
    checkify.check(~wrong[at], message, at=at, value=values[at])
