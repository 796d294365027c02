"""A decode step over a paged cache: plain XLA against the reference, in turn, on this machine."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.kernels.paged_attention.reference import paged_attention_reference
from axon.kernels.paged_attention.xla import paged_attention_xla
from scripts.bench import reference
from scripts.bench.timing import alternate, median_error

HEAD_DIM = 64
HEADS = ((reference.MODEL.heads, reference.MODEL.kv_heads), (8, 4), (8, 2))
"""Of queries and of keys: those of `axon bench train`'s model, and two that share."""

SHAPES = tuple((*heads, page_size) for heads in HEADS for page_size in (16, 64))
"""heads, kv_heads and page_size of each measurement."""


def measure_decode(sequences: int = 16, context: int = 1024, room: int = 1, rounds: int = 15) -> dict[str, Any]:
    """Milliseconds of one decode step of each, and reference ÷ xla, for each of `SHAPES`, in float32.

    Args:
        sequences: of `context` tokens each, the new one included. room: tokens that the page table has room for, in
            contexts; 1 is a table that is full.
        rounds: of which the median counts; `error` is the standard error of the median ratio.
    """
    results = {}
    for heads, kv_heads, page_size in SHAPES:
        batch = _batch(sequences, context, room, heads, kv_heads, page_size)
        seconds = alternate(
            {"reference": _step(paged_attention_reference, *batch), "xla": _step(paged_attention_xla, *batch)}, rounds
        )
        ratios = seconds["reference"] / seconds["xla"]
        results[f"heads {heads}, kv_heads {kv_heads}, pages of {page_size}"] = {
            "reference_ms": 1e3 * float(np.median(seconds["reference"])),
            "xla_ms": 1e3 * float(np.median(seconds["xla"])),
            "ratio": float(np.median(ratios)),
            "error": median_error(ratios),
        }
    return results


def _batch(
    sequences: int, context: int, room: int, heads: int, kv_heads: int, page_size: int
) -> tuple[list[Any], Cache, AttentionInputs]:
    """Rows of queries, keys and values; a random cache; and pages in random order."""
    rng = np.random.default_rng(0)
    columns = room * context // page_size
    pages = 1 + sequences * columns
    table = 1 + rng.permutation(pages - 1).reshape(sequences, columns)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    cache = Cache(*(draw(pages, kv_heads, page_size, HEAD_DIM) for _ in range(2)))
    rows = [draw(sequences, count, HEAD_DIM) for count in (heads, kv_heads, kv_heads)]
    lens, bounds = jnp.full(sequences, context, jnp.int32), jnp.arange(sequences + 1, dtype=jnp.int32)
    return rows, cache, AttentionInputs(lens, jnp.asarray(table, jnp.int32), bounds)


def _step(run: Callable[..., Any], rows: list[Any], cache: Cache, inputs: AttentionInputs) -> Callable[[], None]:
    """One decode step, its cache donated, and the result the next one's."""
    compiled = jax.jit(functools.partial(run, config=AttentionConfig(HEAD_DIM**-0.5)), donate_argnums=3)
    current = [jax.tree.map(jnp.copy, cache)]

    def step():
        _, current[0] = jax.block_until_ready(compiled(*rows, current[0], inputs))

    return step
