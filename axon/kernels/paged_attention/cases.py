"""Configurations of the paged attention kernel that are compiled for chips: a decode step, a prefill, a mixed batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.kernels.case import Case, Cost, Part
from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.kernels.paged_attention.tpu import paged_attention_tpu

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of Llama 3 8B."""


def cases() -> list[Case]:
    """Decode steps over caches of each type and page size, a prefill, verification, a window, and split pages."""
    decode = [
        _case(f"decode, {dtype}, pages of {size}", dtype, size, sequences=64, queries=1, length=2048)
        for dtype in ("bfloat16", "int8", "float8_e4m3fn")
        for size in (16, 64, 128)
    ]
    others = [
        _case("decode, int8, pages of 48", "int8", 48, sequences=64, queries=1, length=2016),
        _case("prefill, bfloat16, pages of 64", "bfloat16", 64, sequences=4, queries=1024, length=1024),
        _case("prefill, int8, pages of 128", "int8", 128, sequences=4, queries=1024, length=1024),
        _case("verification of 4, bfloat16, pages of 64", "bfloat16", 64, sequences=32, queries=4, length=2048),
        _case(
            "decode, bfloat16, window 1024 and soft cap",
            "bfloat16",
            64,
            sequences=64,
            queries=1,
            length=4096,
            config=AttentionConfig(HEAD_DIM**-0.5, window=1024, soft_cap=50.0),
        ),
        _case(
            "long decode, bfloat16, pages split in 2", "bfloat16", 128, sequences=4, queries=1, length=32768, splits=2
        ),
    ]
    return decode + others


def _case(
    name: str,
    dtype: str,
    page_size: int,
    *,
    sequences: int,
    queries: int,
    length: int,
    config: AttentionConfig = AttentionConfig(HEAD_DIM**-0.5),
    splits: int = 1,
) -> Case:
    """`sequences` of `length` tokens each, of which the last `queries` are new."""
    tokens, columns = sequences * queries, length // page_size
    make = partial(Cache.empty, sequences * columns + 1, KV_HEADS, page_size, HEAD_DIM, dtype)
    cache = jax.eval_shape(make)
    shapes = [(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    rows = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    batch = [(sequences,), (sequences, columns), (sequences + 1,)]
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in batch]
    arrays, treedef = jax.tree.flatten(cache)
    return Case(
        operation="paged_attention",
        name=name,
        function=_function(treedef, config, splits),
        operands=(*rows, *arrays, *integers),
        cost=cost(cache, sequences, queries, length, config.window),
    )


def _function(treedef: Any, config: AttentionConfig, splits: int) -> Callable[..., Any]:
    def run(q: Array, k: Array, v: Array, *rest: Array):
        cache, inputs = jax.tree.unflatten(treedef, rest[:-3]), AttentionInputs(*rest[-3:])
        return paged_attention_tpu(q, k, v, cache, inputs, config, splits=splits)

    return run


def cost(cache: Any, sequences: int, queries: int, length: int, window: int | None) -> Cost:
    """4·head_dim FLOPs a head and pair of query and seen key; each sequence's seen pages once, queries and outputs.

    A query at position p sees min(p + 1, window) keys; a block of queries reads its pages again, which is left out.
    """
    seen = sum(min(at + 1, window or length) for at in range(length - queries, length))
    read = length if window is None else min(length, window + queries - 1)
    item = cache.keys.dtype.itemsize
    token = 2 * KV_HEADS * (HEAD_DIM * item + (4 if cache.key_scales is not None else 0))
    rows = sequences * queries * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM * 2
    return Cost(4 * HEADS * HEAD_DIM * sequences * seen, sequences * (read + queries) * token + rows)


def parts() -> list[Part]:
    """What is done with a block of pages of 128 in a decode step, and in a prefill, and the write of new tokens."""
    decode = _case("decode", "bfloat16", 128, sequences=64, queries=1, length=2048)
    prefill = _case("prefill", "bfloat16", 128, sequences=4, queries=1024, length=1024)
    chosen = (
        ("decode, block of pages", "paged_attention", decode),
        ("prefill, block of pages", "paged_attention", prefill),
        ("write of a token's page", "paged_attention_write", decode),
    )
    return [Part("paged_attention", name, call, case.function, case.operands) for name, call, case in chosen]
