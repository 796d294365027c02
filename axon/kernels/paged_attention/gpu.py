"""Paged attention on Hopper GPUs: new tokens written into their pages, then our own kernel in Pallas Mosaic GPU.

After FlashAttention-3 (Shah et al., arXiv:2407.08608) over PagedAttention's cache (Kwon et al., arXiv:2309.06180); of
few and long sequences the pages are split into parts, as FlashDecoding does, which merge exactly by their log-sum-exp.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from axon.kernels.cost import Cost
from axon.kernels.paged_attention.blocks import Blocks, blocks, join, merge, of_rows, split
from axon.kernels.paged_attention.cache import Cache, write
from axon.kernels.paged_attention.gpu_kernel import Kernel, Operands
from axon.kernels.paged_attention.gpu_work import TMA_ROWS, Shape, queries_of_block, row_positions, shape_of, table
from axon.kernels.paged_attention.groups import KernelTables
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs, places
from axon.kernels.wgmma_softmax import LEAST, LOG2E


def tables_gpu(q: Array, cache: Cache, inputs: AttentionInputs) -> KernelTables:
    """What `paged_attention_gpu` looks up, of the shapes of `q` and `cache` alone."""
    tokens = q.shape[0]
    return KernelTables(places(inputs, tokens), blocks(inputs, tokens, queries_of_block(q, cache, inputs)))


def paged_attention_gpu(
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    inputs: AttentionInputs,
    config: AttentionConfig,
    tables: KernelTables | None = None,
    *,
    interpret: Any = False,
) -> tuple[Array, Cache]:
    """See `axon.kernels.paged_attention.paged_attention`."""
    tables = tables or tables_gpu(q, cache, inputs)
    plan = tables.plan
    cache = write(cache, k, v, inputs, tables.where)
    shape = shape_of(q, cache, inputs, plan, config)
    rows = split(q, plan, cache.kv_heads)
    real = rows.shape[2]
    padding = (-real % TMA_ROWS) if shape.alternating else shape.rows - real
    operands = Operands(
        jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0))),
        cache,
        inputs.page_table,
        table(plan, shape),
        row_positions(plan, shape),
        _tops(inputs, cache, plan, shape),
        _padded(of_rows(inputs.alibi_slopes, cache.kv_heads, plan.queries), shape),
    )
    result = Kernel(shape, _cost(operands, shape), interpret).run(operands)
    out = result[:, :, :real] if shape.splits == 1 else merge(result[0][..., :real, :], result[1][..., :real, None])
    return join(out.astype(q.dtype), plan, tables.where, inputs), cache


def _tops(inputs: AttentionInputs, cache: Cache, plan: Blocks, shape: Shape) -> Array | None:
    """See `Operands`."""
    sinks = _padded(of_rows(inputs.sinks, cache.kv_heads, plan.queries), shape)
    return None if sinks is None else jnp.stack([jnp.maximum(sinks * LOG2E, LEAST), jnp.full_like(sinks, LEAST)])


def _padded(x: Array | None, shape: Shape) -> Array | None:
    """`kv_heads rows` of a block, in float32."""
    return None if x is None else jnp.pad(x.astype(jnp.float32), ((0, 0), (0, shape.rows - x.shape[1])))


def _cost(operands: Operands, shape: Shape) -> Cost:
    """As if every sequence filled its row of the page table, of whose lengths the program knows no more."""
    blocks, heads, rows, width = operands.q.shape
    keys = blocks * heads * shape.columns * shape.page_size
    return Cost(4 * rows * width * keys, 2 * width * keys * operands.cache.keys.dtype.itemsize)
