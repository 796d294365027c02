"""Configurations of the paged attention kernel that are compiled for chips: a decode step, a prefill, a mixed batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.kernels.cost import Cost
from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.kernels.paged_attention.tpu import paged_attention_tpu
from scripts.bench.case import Case, Part

LLAMA, GPT_OSS = (32, 8, 128), (64, 8, 64)
"""Heads, kv_heads and head_dim of Llama 3 8B, and of gpt-oss."""


def cases() -> list[Case]:
    """Decode steps over caches of each type and page size, a prefill, verification, a window, and split pages."""
    two_cores = partial(paged_attention_tpu, cores=2)
    decode = [
        case(f"decode, {dtype}, pages of {size}", dtype, size, sequences=64, queries=1, length=2048)
        for dtype in ("bfloat16", "int8", "float8_e4m3fn")
        for size in (16, 64, 128)
    ]
    others = [
        case("decode, int8, pages of 48", "int8", 48, sequences=64, queries=1, length=2016),
        case("prefill, bfloat16, pages of 64", "bfloat16", 64, sequences=4, queries=1024, length=1024),
        case("prefill, int8, pages of 128", "int8", 128, sequences=4, queries=1024, length=1024),
        case("verification of 4, bfloat16, pages of 64", "bfloat16", 64, sequences=32, queries=4, length=2048),
        case(
            "decode, bfloat16, window 1024 and soft cap",
            "bfloat16",
            64,
            sequences=64,
            queries=1,
            length=4096,
            config=AttentionConfig(128**-0.5, window=1024, soft_cap=50.0),
        ),
        case(
            "long decode, bfloat16, on two cores",
            "bfloat16",
            128,
            sequences=4,
            queries=1,
            length=32768,
            attend=two_cores,
        ),
        case("decode, bfloat16, on two cores", "bfloat16", 128, sequences=64, queries=1, length=2048, attend=two_cores),
        case(
            "decode, bfloat16, head_dim 64, sinks and window 128",
            "bfloat16",
            128,
            sequences=64,
            queries=1,
            length=2048,
            heads=GPT_OSS,
            config=AttentionConfig(64**-0.5, window=128),
            extra=("sinks",),
        ),
        case("prefill, bfloat16, head_dim 64", "bfloat16", 128, sequences=4, queries=1024, length=1024, heads=GPT_OSS),
        case("decode, int8, head_dim 64", "int8", 128, sequences=64, queries=1, length=2048, heads=GPT_OSS),
        case(
            "decode, bfloat16, head_dim 96, ALiBi",
            "bfloat16",
            128,
            sequences=64,
            queries=1,
            length=2048,
            heads=(32, 8, 96),
            extra=("alibi_slopes",),
        ),
    ]
    return decode + others


def case(
    name: str,
    dtype: str,
    page_size: int,
    *,
    sequences: int,
    queries: int,
    length: int,
    heads: tuple[int, int, int] = LLAMA,
    config: AttentionConfig | None = None,
    extra: tuple[str, ...] = (),
    attend: Callable[..., Any] = paged_attention_tpu,
    q: str = "bfloat16",
) -> Case:
    """`sequences` of `length` tokens each, of which the last `queries` are new.

    `extra`: what else each head has. `attend`: the implementation. `q`: the dtype of the queries.
    """
    num_heads, kv_heads, head_dim = heads
    config = config or AttentionConfig(head_dim**-0.5)
    tokens, columns = sequences * queries, length // page_size
    cache = jax.eval_shape(partial(Cache.empty, sequences * columns + 1, kv_heads, page_size, head_dim, dtype))
    rows = [jax.ShapeDtypeStruct((tokens, n, head_dim), jnp.dtype(q)) for n in (num_heads, kv_heads, kv_heads)]
    batch = [(sequences,), (sequences, columns), (sequences + 1,)]
    integers: list[Any] = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in batch]
    given: dict[str, Any] = {name: jax.ShapeDtypeStruct((num_heads,), jnp.float32) for name in extra}
    operands, treedef = jax.tree.flatten((*rows, cache, AttentionInputs(*integers, **given)))
    return Case(
        operation="paged_attention",
        name=name,
        function=_function(treedef, config, attend),
        operands=tuple(operands),
        cost=cost(cache, num_heads, sequences, queries, length, config.window),
    )


def _function(treedef: Any, config: AttentionConfig, attend: Callable[..., Any]) -> Callable[..., Any]:
    def run(*operands: Array):
        q, k, v, cache, inputs = jax.tree.unflatten(treedef, operands)
        return attend(q, k, v, cache, inputs, config)

    return run


def cost(cache: Cache, heads: int, sequences: int, queries: int, length: int, window: int | None) -> Cost:
    """4·head_dim FLOPs a head and pair of query and seen key; each sequence's seen pages once, queries and outputs.

    A query at position p sees min(p + 1, window) keys; a block of queries reads its pages again, which is left out.
    """
    seen = sum(min(at + 1, window or length) for at in range(length - queries, length))
    read = length if window is None else min(length, window + queries - 1)
    item = cache.keys.dtype.itemsize
    token = 2 * cache.kv_heads * (cache.head_dim * item + (4 if cache.key_scales is not None else 0))
    rows = sequences * queries * (2 * heads + 2 * cache.kv_heads) * cache.head_dim * 2
    return Cost(4 * heads * cache.head_dim * sequences * seen, sequences * (read + queries) * token + rows)


def parts() -> list[Part]:
    """What is done with a block of pages of 128 in a decode step, and in a prefill, and the write of new tokens."""
    decode = case("decode", "bfloat16", 128, sequences=64, queries=1, length=2048)
    prefill = case("prefill", "bfloat16", 128, sequences=4, queries=1024, length=1024)
    chosen = (
        ("decode, block of pages", "paged_attention", decode),
        ("prefill, block of pages", "paged_attention", prefill),
        ("write of a token's page", "paged_attention_write", decode),
    )
    return [Part("paged_attention", name, call, one.function, one.operands) for name, call, one in chosen]
