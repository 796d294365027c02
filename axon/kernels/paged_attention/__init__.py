"""Attention over a paged cache: prefill, chunked prefill, decode and speculative verification as one ragged call."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from jax import Array

from axon.axes import platform
from axon.kernels.choice import choose, cores, fitting, off_gpu, with_gpu, with_tpu
from axon.kernels.paged_attention import gpu_support
from axon.kernels.paged_attention.cache import Cache
from axon.kernels.paged_attention.groups import KernelTables
from axon.kernels.paged_attention.ragged import AttentionConfig, AttentionInputs
from axon.kernels.paged_attention.reference import paged_attention_reference
from axon.kernels.paged_attention.tpu import paged_attention_tpu, tables_tpu, unfit
from axon.kernels.paged_attention.tpu_kernel import LANES
from axon.kernels.paged_attention.validate import validate, validate_constants
from axon.kernels.paged_attention.xla import paged_attention_xla
from axon.kernels.paged_attention.xla_tables import XlaTables, tables_xla

__all__ = ["Cache", "Tables", "paged_attention", "paged_attention_reference", "paged_attention_tables"]

Tables = KernelTables | XlaTables
"""Of the implementation that made them."""


def paged_attention(
    q: Array,
    k: Array,
    v: Array,
    cache: Cache,
    kv_lens: Array,
    page_table: Array,
    cu_q_lens: Array,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks: Array | None = None,
    distance_bias: Array | None = None,
    alibi_slopes: Array | None = None,
    tables: Tables | None = None,
) -> tuple[Array, Cache]:
    """Causal grouped-query attention of new tokens over their sequences' pages, which first get their keys and values.

    After PagedAttention (Kwon et al., arXiv:2309.06180). The queries of sequence i are rows cu_q_lens[i] to
    cu_q_lens[i + 1]; row j of n sits at position kv_len - n + j. A decode step has one row a sequence, a prefill has
    many, and one call may have both. On one device's shard; no gradients.

    Args:
        q: `tokens heads head_dim`; k, v: `tokens kv_heads head_dim`; heads a multiple of kv_heads. Rows past
            cu_q_lens[-1] are padding: their output is zeros, and what they write goes to page 0.
        cache: updated in place if the caller donates it. Keys and values are stored in its type; attention reads
            them as stored, also those of this call.
        kv_lens: int32 `sequences`, lengths with the new tokens. page_table: int32 `sequences pages_per_sequence`;
            entries past a length are not read for their meaning. cu_q_lens: int32 `sequences + 1`, from 0, not falling.
        window: keys that a query sees, itself included; all before it by default.
        soft_cap: c of c·tanh(score/c); none by default. scale: of the scores; 1/√head_dim by default.
        sinks: `heads`, a score of each head that takes part in the softmax and has no value (arXiv:2309.17453).
        distance_bias: `heads 2·n−1`, where n is how many positions a row of page_table has room for; added to the score
            of a key and a query is the element `n − 1 + key − query`, of their positions (T5, arXiv:1910.10683).
        alibi_slopes: `heads`; `slope·(key − query)`, of their positions, is added to the scores (arXiv:2108.12409).
        tables: of `paged_attention_tables`, for as many rows and heads, of which this reads neither kv_lens nor
            cu_q_lens again; made here by default.

    Returns: `tokens heads head_dim` in the dtype of `q`, and the cache. Raises `UserError` where shapes do not fit.
    """
    inputs = AttentionInputs(kv_lens, page_table, cu_q_lens, sinks, distance_bias, alibi_slopes)
    validate_constants(window, soft_cap)
    validate(q, k, v, cache, inputs)
    config = AttentionConfig(float(q.shape[2] ** -0.5) if scale is None else scale, window, soft_cap)
    chosen = choose("paged_attention", _candidates(q, cache, inputs), _detail(cache, config))
    if chosen == "tpu":
        return paged_attention_tpu(q, k, v, cache, inputs, config, cast(KernelTables | None, tables), cores=cores())
    if chosen == "mosaic":
        return _mosaic().paged_attention_gpu(q, k, v, cache, inputs, config, tables)
    if chosen == "xla":
        return paged_attention_xla(q, k, v, cache, inputs, config, cast(XlaTables | None, tables))
    return paged_attention_reference(q, k, v, cache, inputs, config)


def paged_attention_tables(
    q: Any,
    cache: Cache,
    kv_lens: Array,
    page_table: Array,
    cu_q_lens: Array,
    *,
    biased: bool = False,
) -> Tables | None:
    """What `paged_attention` looks up of a step's sequences, the same in all layers: made once, it is not made in each.

    Args:
        q, cache: only the shapes and dtypes count. biased: whether there will be a `distance_bias`.

    Returns: None if the implementation that will run, `reference`, has none.
    """
    inputs = AttentionInputs(kv_lens, page_table, cu_q_lens, distance_bias=q if biased else None)
    chosen, _ = fitting("paged_attention", _candidates(q, cache, inputs))
    if chosen == "tpu":
        return tables_tpu(q, cache, inputs)
    if chosen == "mosaic":
        return _mosaic().tables_gpu(q, cache, inputs)
    return tables_xla(q.shape[0], inputs) if chosen == "xla" else None


def _candidates(q: Array, cache: Cache, inputs: AttentionInputs) -> Mapping[str, str | None]:
    others = with_tpu(unfit(q, cache, inputs), {"xla": None, "reference": None})
    return with_gpu({"mosaic": _without_mosaic(q, cache, inputs)}, others)


def _mosaic() -> Any:
    """The Hopper kernel, imported where it runs."""
    return import_module("axon.kernels.paged_attention.gpu")


def _without_mosaic(q: Array, cache: Cache, inputs: AttentionInputs) -> str | None:
    """Why the Hopper kernel cannot run this; None if it can."""
    return off_gpu(lambda chip: gpu_support.unsupported(q, cache, inputs, chip))


def _detail(cache: Cache, config: AttentionConfig) -> str:
    parts = [f"{cache.keys.dtype.name} pages of {cache.page_size}"]
    parts += [] if config.window is None else [f"window {config.window}"]
    parts += [] if config.soft_cap is None else [f"soft cap {config.soft_cap:g}"]
    if platform() == "tpu" and cache.key_scales is not None and cache.page_size % LANES:
        parts.append(f"whose scales each call lays out anew, as pages that {LANES} divides do not need")
    return ", ".join(parts)
