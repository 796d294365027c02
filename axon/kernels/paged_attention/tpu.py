"""Paged attention on TPUs: new tokens written into their pages, then a Pallas kernel over blocks of queries.

After FlashAttention (Dao, arXiv:2307.08691) over PagedAttention's cache (Kwon et al., arXiv:2309.06180); a sequence's
pages may be split into parts, as FlashDecoding does, whose results are merged exactly by their log-sum-exp.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.paged_attention.blocks import Blocks, blocks, join, split
from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs, places
from axon.kernels.paged_attention.tpu_kernel import LANES, attend
from axon.kernels.paged_attention.tpu_stream import TILE, Shape, tiled
from axon.kernels.paged_attention.tpu_write import write_tpu

KEYS = 512
"""Positions a step, at most."""

BUFFERS = 4 * 2**20
"""Bytes of VMEM that two steps' keys and values take, about, at most: 512 positions of 8 heads of 128 bfloat16s."""

ROWS = 2048
"""Rows of a block of queries, of all heads, at most: with each one's running sums, 6 MiB of VMEM at head_dim 128."""

HEAD_DIMS = (128, 256)
"""Widths of a head that were compiled for v5e, v5p, v6e and tpu7x: whole rows of lanes."""

SCALARS = 512 * 1024
"""Bytes of page table, at most, that the scalar core's memory has room for."""


def unfit(q: Array, cache: Cache, inputs: AttentionInputs) -> str | None:
    """Why the kernel cannot do this attention; None if it can."""
    if inputs.sinks is not None:
        return "the kernel has no sinks"
    if inputs.distance_bias is not None:
        return "the kernel adds no bias by distance to the scores"
    if cache.head_dim not in HEAD_DIMS:
        return f"the kernel needs a head_dim of {' or '.join(map(str, HEAD_DIMS))}, not {cache.head_dim}"
    if cache.page_size % TILE:
        return f"the kernel needs pages whose size {TILE} divides, not {cache.page_size}"
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the kernel needs queries of bfloat16 or float32, not {q.dtype}"
    if 4 * inputs.page_table.size > SCALARS:
        return f"a page table of {4 * inputs.page_table.size:,} bytes is over the {SCALARS:,} that fit in SMEM"
    return None


def paged_attention_tpu(
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    inputs: AttentionInputs,
    config: AttentionConfig,
    *,
    splits: int = 1,
    queries: int | None = None,
    interpret: Any = False,
) -> tuple[Array, Cache]:
    """See `axon.kernels.paged_attention.paged_attention`.

    Args:
        queries: rows of one sequence a block; by default from the rows that a sequence has on average.
    """
    cache = write_tpu(cache, k, v, inputs, interpret=interpret)
    where = places(inputs, q.shape[0])
    plan = blocks(inputs, q.shape[0], queries or _queries(q, inputs))
    shape = Shape(
        page_size=cache.page_size,
        width=_width(cache, inputs),
        columns=inputs.page_table.shape[1],
        queries=plan.queries,
        group=q.shape[1] // cache.kv_heads,
        splits=splits,
        config=config,
    )
    rows = split(q, plan, cache.kv_heads)
    spare = tiled(rows.shape[2]) - rows.shape[2]
    out = _call(jnp.pad(rows, ((0, 0), (0, 0), (0, spare), (0, 0))), cache, inputs, plan, shape, interpret)
    return join(out[:, :, : rows.shape[2]].astype(q.dtype), plan, where, inputs), cache


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


def _call(q: Array, cache: Cache, inputs: AttentionInputs, plan: Blocks, shape: Shape, interpret: Any) -> Array:
    """`blocks kv_heads rows head_dim` → the same."""
    count, heads, rows, head_dim = q.shape
    cached = [a for a in (cache.keys, cache.values, cache.key_scales, cache.value_scales) if a is not None]
    columns = plan.first_keys(shape.config.window) // shape.page_size
    scalars = [inputs.page_table.reshape(-1), plan.sequences, plan.positions, plan.ends, columns]
    spec = pl.BlockSpec((1, heads, rows, head_dim), lambda part, block, *_: (block, 0, 0, 0))
    out_specs, out_shape = spec, jax.ShapeDtypeStruct(q.shape, q.dtype)
    if shape.splits > 1:
        place = lambda part, block, *_: (part, block, 0, 0, 0)  # noqa: E731
        widths = (head_dim, LANES)
        out_specs = [pl.BlockSpec((1, 1, heads, rows, width), place) for width in widths]
        sizes = [(shape.splits, count, heads, rows, width) for width in widths]
        out_shape = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    made_out: Any = pl.pallas_call(
        partial(attend, shape, len(cached) == 4),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.splits, count),
            in_specs=[spec, *(pl.BlockSpec(memory_space=pl.ANY) for _ in cached)],
            out_specs=out_specs,
            scratch_shapes=_scratch(cached, heads, rows, head_dim, shape),
        ),
        out_shape=out_shape,
        # Each copy of a page would check its two addresses; the interpreter checks them in the tests.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention",
    )(*(a.astype(jnp.int32) for a in scalars), q, *cached)
    return made_out if shape.splits == 1 else _merge(*made_out)


def _scratch(cached: list[Array], heads: int, rows: int, head_dim: int, shape: Shape) -> list[Any]:
    return [
        *(pltpu.VMEM((2, shape.width, *a.shape[1:]), a.dtype) for a in cached),
        pltpu.SemaphoreType.DMA((2, len(cached))),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
        pltpu.VMEM((heads, rows, head_dim), jnp.float32),
    ]


def _merge(out: Array, lse: Array) -> Array:
    """Parts `splits …` as one: Σ exp(lse_i - lse)·out_i, with lse the log-sum-exp of all."""
    weights = jax.nn.softmax(lse[..., :1], axis=0)
    return jnp.sum(weights * out, axis=0)
