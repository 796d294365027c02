"""Paged attention on TPUs: new tokens written into their pages, then a Pallas kernel over blocks of queries.

After FlashAttention (Dao, arXiv:2307.08691) over PagedAttention's cache (Kwon et al., arXiv:2309.06180); a sequence's
pages may be split into parts, as FlashDecoding does, whose results are merged exactly by their log-sum-exp.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.paged_attention.blocks import Blocks, blocks, in_blocks, join, merge, of_rows
from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.groups import KernelTables, groups
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs, places
from axon.kernels.paged_attention.tpu_kernel import LANES, attend
from axon.kernels.paged_attention.tpu_stream import NARROW, TILE, Shape, along_lanes, tiled
from axon.kernels.paged_attention.tpu_write import group_slots, write_tpu

KEYS = 512
"""Positions a step, at most."""

BUFFERS = 4 * 2**20
"""Bytes of VMEM that two steps' keys and values take, about, at most: 512 positions of 8 heads of 128 bfloat16s."""

ROWS = 2048
"""Rows of a block of queries, of all heads, at most: with each one's running sums, 6 MiB of VMEM at head_dim 128."""

HEAD_DIMS = (*NARROW, 128, 256)
"""Widths of a head that were compiled for v5e, v5p, v6e and tpu7x."""

BLOCKS_A_CORE = 4
"""Blocks for each core from which on cores share them; of fewer, one core may get much more than another."""

SCALARS = 512 * 1024
"""Bytes of page table, at most, that the scalar core's memory has room for."""


def unfit(q: Array, cache: Cache, inputs: AttentionInputs) -> str | None:
    """Why the kernel cannot do this attention; None if it can."""
    if inputs.distance_bias is not None:
        return "the kernel adds no bias by distance to the scores"
    if cache.head_dim not in HEAD_DIMS:
        *most, last = HEAD_DIMS
        return f"the kernel needs a head_dim of {', '.join(map(str, most))} or {last}, not {cache.head_dim}"
    least = LANES if along_lanes(cache) else TILE
    if cache.page_size % least:
        return (
            f"with head_dim {cache.head_dim} the kernel needs pages whose size {least} divides, not {cache.page_size}"
        )
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the kernel needs queries of bfloat16 or float32, not {q.dtype}"
    if 4 * inputs.page_table.size > SCALARS:
        return f"a page table of {4 * inputs.page_table.size:,} bytes is over the {SCALARS:,} that fit in SMEM"
    return None


def tables_tpu(q: Array, cache: Cache, inputs: AttentionInputs, *, queries: int | None = None) -> KernelTables:
    """What `paged_attention_tpu` looks up, of the shapes of `q` and `cache` alone.

    `queries`: rows of one sequence a block; by default from the rows that a sequence has on average.
    """
    tokens = q.shape[0]
    groups_of = partial(groups, inputs, tokens, page_size=cache.page_size)
    return KernelTables(
        where=places(inputs, tokens),
        plan=blocks(inputs, tokens, queries or _queries(q, inputs)),
        groups=groups_of(group_slots(cache)),
        pages=None if cache.key_scales is None else groups_of(cache.page_size),
    )


def paged_attention_tpu(
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    inputs: AttentionInputs,
    config: AttentionConfig,
    tables: KernelTables | None = None,
    *,
    cores: int = 1,
    interpret: Any = False,
) -> tuple[Array, Cache]:
    """See `axon.kernels.paged_attention.paged_attention`. `cores`: of a device, between which the work is divided."""
    tables = tables or tables_tpu(q, cache, inputs)
    cache = write_tpu(cache, k, v, tables, interpret=interpret)
    plan, lanes = tables.plan, along_lanes(cache)
    shares, splits = _division(len(plan.sizes), cores)
    shape = Shape(
        page_size=cache.page_size,
        width=_width(cache, inputs),
        columns=inputs.page_table.shape[1],
        queries=plan.queries,
        group=q.shape[1] // cache.kv_heads,
        shares=shares,
        splits=splits,
        lanes=lanes,
        config=config,
    )
    count = len(plan.sizes)
    rows = jnp.pad(in_blocks(q, plan), ((0, -count % shares), *[(0, 0)] * 3))
    of_heads = [of_rows(x, cache.kv_heads, plan.queries) for x in (inputs.sinks, inputs.alibi_slopes)]
    out = _call(rows, of_heads, cache, inputs, plan, shape, interpret)
    return join(out[:count].astype(q.dtype), plan, tables.where, inputs), cache


def _division(blocks: int, cores: int) -> tuple[int, int]:
    """Into how many shares the blocks are cut, and into how many parts each block's pages, so that all cores work."""
    return (cores, 1) if blocks >= BLOCKS_A_CORE * cores else (1, cores)


def _queries(q: Array, inputs: AttentionInputs) -> int:
    """1 for a decode step; else a power of two, four times what a sequence has on average, up to `ROWS` of all heads.

    Four times: rows are shared out unevenly, and while pages arrive a few rows more cost nothing.
    """
    tokens, heads, _ = q.shape
    most = min(max(1, ROWS // heads), 4 * tokens // inputs.sequences)
    return 1 if tokens <= inputs.sequences else 1 << (most.bit_length() - 1)


def _width(cache: Cache, inputs: AttentionInputs) -> int:
    """Pages a step."""
    page_bytes = cache.keys.size * cache.keys.dtype.itemsize // cache.pages
    return min(max(1, min(KEYS // cache.page_size, BUFFERS // (4 * page_bytes))), inputs.page_table.shape[1])


def _call(
    q: Array,
    of_heads: list[Array | None],
    cache: Cache,
    inputs: AttentionInputs,
    plan: Blocks,
    shape: Shape,
    interpret: Any,
) -> Array:
    """`blocks queries heads head_dim` → `blocks kv_heads (queries group) head_dim`, or as `blocks 1 (queries heads)
    head_dim`. `of_heads`: sinks and slopes, each `kv_heads (queries group)`."""
    count, queries, heads, head_dim = q.shape
    real, kv_heads = queries * shape.group, heads // shape.group
    rows, per_share = tiled(real), count // shape.shares
    own = lambda lane, index: index * shape.shares + lax.div(lane, shape.splits)  # noqa: E731
    spec = pl.BlockSpec((1, *q.shape[1:]), lambda lane, index, *_: (own(lane, index), 0, 0, 0))
    in_rows = [_in_lanes(x, rows) for x in of_heads if x is not None]
    cached = _cached(cache, shape)
    scalars = _scalars(inputs, plan, shape, count)
    out_specs, out_shape = spec, jax.ShapeDtypeStruct(q.shape, q.dtype)
    if shape.splits > 1:
        place = lambda lane, index, *_: (lane, index, 0, 0, 0)  # noqa: E731
        widths = (head_dim, LANES)
        out_specs = [pl.BlockSpec((1, 1, kv_heads, rows, width), place) for width in widths]
        sizes = [(shape.splits, count, kv_heads, rows, width) for width in widths]
        out_shape = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    result: Any = pl.pallas_call(
        partial(attend, shape, len(cached) == 4, [x is not None for x in of_heads]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.shares * shape.splits, per_share),
            in_specs=[
                spec,
                *(pl.BlockSpec(x.shape, lambda *_: (0, 0, 0)) for x in in_rows),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in cached),
            ],
            out_specs=out_specs,
            scratch_shapes=_scratch(cached, q.dtype, kv_heads, rows, head_dim, shape),
        ),
        out_shape=out_shape,
        # Each copy of a page would check its two addresses; the interpreter checks them in the tests.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, q, *in_rows, *cached)
    if shape.splits == 1:
        return rearrange(result, "blocks queries heads head_dim -> blocks 1 (queries heads) head_dim")
    out, lse = result
    return merge(out, lse[..., :1])[:, :, :real]


def _cached(cache: Cache, shape: Shape) -> list[Array]:
    """The arrays of pages as the kernel sees them."""
    arrays = [a.swapaxes(2, 3) if shape.lanes else a for a in (cache.keys, cache.values)]
    return arrays + [a for a in (cache.key_scales, cache.value_scales) if a is not None]


def _scalars(inputs: AttentionInputs, plan: Blocks, shape: Shape, count: int) -> list[Array]:
    """`Work` of `count` blocks, those past the plan's without a query."""
    columns = plan.first_keys(shape.config.window) // shape.page_size
    of_blocks = (plan.sequences, plan.positions, plan.ends, columns)
    padded = [jnp.pad(a, (0, count - len(a))) for a in of_blocks]
    return [a.astype(jnp.int32) for a in (inputs.page_table.reshape(-1), *padded)]


def _in_lanes(of_heads: Array, rows: int) -> Array:
    """`kv_heads rows` numbers, the last rows padding, in every lane."""
    padded = jnp.pad(of_heads.astype(jnp.float32), ((0, 0), (0, rows - of_heads.shape[1])))
    return jnp.broadcast_to(padded[..., None], (*padded.shape, LANES))


def _scratch(cached: list[Array], dtype: Any, heads: int, rows: int, head_dim: int, shape: Shape) -> list[Any]:
    return [
        *(pltpu.VMEM((2, shape.width, *a.shape[1:]), a.dtype) for a in cached),
        pltpu.SemaphoreType.DMA((2, len(cached))),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
        pltpu.VMEM((heads, rows, head_dim), jnp.float32),
        pltpu.VMEM((heads, rows, head_dim), dtype),
    ]
