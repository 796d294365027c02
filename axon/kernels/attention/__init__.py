"""Attention: softmax(q·kᵀ·scale)·v under a declarative mask, by the implementation that fits."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon.axes import current
from axon.chips import chip_of
from axon.errors import UserError
from axon.kernels.attention import cudnn, gpu_support
from axon.kernels.attention.flash import NAME
from axon.kernels.attention.fp8 import PRODUCTS, FP8Products
from axon.kernels.attention.mask import (
    Causal,
    Everything,
    Mask,
    Prefix,
    SameDocument,
    Window,
    causal_window,
    mean_keys,
    rules,
)
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs
from axon.kernels.attention.reference import attention_gradients_reference, attention_reference
from axon.kernels.attention.tiles import Tiles, tiles_for
from axon.kernels.attention.tpu import attention_gradients_tpu, attention_tpu
from axon.kernels.attention.xla import attention_gradients_xla, attention_xla
from axon.kernels.choice import choose, cores, off_gpu, with_gpu, with_tpu

__all__ = [
    "NAME",
    "AttentionConfig",
    "AttentionInputs",
    "Causal",
    "Everything",
    "FP8Products",
    "Mask",
    "Prefix",
    "SameDocument",
    "Window",
    "attention",
    "attention_and_lse",
    "attention_gradients",
    "attention_part",
    "attention_reference",
    "causal_window",
    "mean_keys",
    "rules",
]


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    documents: tuple[Array, Array] | None = None,
    start: Array | int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    distance_bias: Array | None = None,
) -> Array:
    """Grouped-query attention on one device's shard (Vaswani et al., arXiv:1706.03762; Ainslie et al., 2305.13245).

    Args:
        q: `batch seq heads head_dim`; k: `batch kv_seq kv_heads head_dim`; heads a multiple of kv_heads.
        v: `batch kv_seq kv_heads value_dim`.
        mask: which keys a query sees, as `Causal() & SameDocument() & Window(4096)`.
        documents: the document of each query and of each key, `batch seq` and `batch kv_seq`.
        start: index of the first query among the keys; traced (a cache's fill) or a constant.
        scale: of the scores; 1/√head_dim by default.
        soft_cap, sinks, alibi_slopes, distance_bias: see `axon.kernels.attention.problem`; no gradient reaches
            alibi_slopes.

    Returns: `batch seq heads value_dim`, in the dtype of `q`; zeros for a query that sees no key.

    Raises `UserError` for operands whose shapes do not match.
    """
    config = AttentionConfig(mask, float(q.shape[-1] ** -0.5) if scale is None else scale, soft_cap)
    return attention_and_lse(q, k, v, config, AttentionInputs(documents, start, sinks, alibi_slopes, distance_bias))[0]


def attention_and_lse(
    q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs = AttentionInputs()
) -> tuple[Array, Array]:
    """As `attention`, with the log-sum-exp of each query's scores, `batch seq heads`, float32 at least.

    With it attentions over parts of the keys merge exactly (ring attention, split-K); −∞ for a query that sees none.
    Both results may be differentiated.
    """
    chosen = _chosen(q, k, v, config, inputs)
    out, lse = _run(chosen, q, k, v, config, inputs)
    if chosen in ("tpu", "cudnn", "mosaic"):
        return out, lse  # which name what their backward needs
    return checkpoint_name(out, NAME), checkpoint_name(lse, NAME)


def attention_part(
    q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs = AttentionInputs()
) -> tuple[Array, Array]:
    """As `attention_and_lse`, over a part of the keys, for whoever merges the parts and has a backward of its own.

    No remat policy is told to save its results. `attention_gradients` is its backward.
    """
    return _run(_chosen(q, k, v, config, inputs), q, k, v, config, inputs)


def attention_gradients(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: AttentionInputs,
    rows: tuple[Array, Array, Array],
    out: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of `q`, `k` and `v`, where `k` and `v` are a part of the keys that the queries see.

    Args:
        config: its `products` are of the forward alone. inputs: without sinks, slopes and bias: sinks are no key's.
        rows: dO, `batch seq heads value_dim`, and of each query, `batch seq heads` float32, the log-sum-exp over *all*
            of its keys, −∞ or ∞ where none of these should count, and D = Σ out·dout − dlse (arXiv:2307.08691).
        out: the output over all keys, `batch seq heads value_dim`, where D is Σ out·dout alone: cuDNN wants it in place
            of D, and does not run without it.

    Returns: in the shapes of the operands, float32, or the dtype of the operands from the kernels for TPUs and GPUs.
    """
    config = replace(config, products=None)
    chosen = _chosen(q, k, v, config, inputs, "it takes D from the output, which is absent" if out is None else None)
    if chosen == "cudnn" and out is not None:
        return cudnn.attention_gradients_cudnn(q, k, v, config, inputs, rows, out)
    if chosen == "tpu":
        return attention_gradients_tpu(q, k, v, config, inputs, rows, tiles=_tiles())
    if chosen == "mosaic":
        return _mosaic().attention_gradients_gpu(q, k, v, config, inputs, rows)
    return (attention_gradients_xla if chosen == "xla" else attention_gradients_reference)(
        q, k, v, config, inputs, rows
    )


def _chosen(
    q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs, without_cudnn: str | None = None
) -> str:
    """The implementation that runs; `without_cudnn`: why cuDNN cannot, whatever the operands, None if it may.

    Raises `UserError` for operands whose shapes do not match.
    """
    _check(q, k, v, config, inputs)
    plain = with_tpu(_unsupported(q, v, inputs), {"xla": None, "reference": None})
    operands = q, k, v, config, inputs
    if config.products is not None:
        return choose("attention", _of_fp8(config.products, plain), str(config))
    of_gpus = {
        "cudnn": without_cudnn or _off_gpu(cudnn.unsupported, *operands),
        "mosaic": _off_gpu(gpu_support.unsupported, *operands),
    }
    if cudnn.takes_bias(q, k, config.mask, inputs):
        of_gpus = dict(reversed(of_gpus.items()))
    return choose("attention", with_gpu(of_gpus, plain), str(config))


def _of_fp8(products: FP8Products, plain: dict[str, str | None]) -> dict[str, str | None]:
    """Implementation → why it cannot multiply in e4m3, of the TPU kernel its own reasons in `plain`; or emulation's."""
    if products.emulate:
        return {"xla": None}
    scope = current()
    chip = None if scope is None else chip_of(scope.placement.chip)
    able = chip is not None and PRODUCTS in chip.products
    without = None if able else f"it is for chips with products of {PRODUCTS}"
    return {"tpu": plain["tpu"] or without, **dict.fromkeys(("xla", "mosaic", "cudnn"), "it has no products in FP8")}


def _run(
    chosen: str, q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs
) -> tuple[Array, Array]:
    if chosen == "tpu":
        return attention_tpu(q, k, v, config, inputs, tiles=_tiles())
    if chosen == "cudnn":
        return cudnn.attention_cudnn(q, k, v, config, inputs)
    if chosen == "mosaic":
        return _mosaic().attention_gpu(q, k, v, config, inputs)
    return (attention_xla if chosen == "xla" else attention_reference)(q, k, v, config, inputs)


def _mosaic() -> Any:
    """The Hopper kernels, for what cuDNN does not take, or only with a bias. Imported where they run."""
    return import_module("axon.kernels.attention.gpu")


def _off_gpu(unsupported: Callable[..., str | None], q: Array, *others: Any) -> str | None:
    """As `off_gpu`, of what has the operands and the chip as its arguments."""
    return off_gpu(lambda chip: _few(q) or unsupported(q, *others, chip))


HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""Widths of keys and of values that the TPU kernel was compiled for, on every chip."""

FEW = 64
"""Queries below which a tile of a flash kernel is mostly padding, and a plain product is as fast."""


def _unsupported(q: Array, v: Array, inputs: AttentionInputs) -> str | None:
    """Why the TPU kernel cannot run this; None if it can."""
    if inputs.distance_bias is not None:
        return "it adds no bias by distance to the scores"
    if (q.shape[3], v.shape[3]) not in HEAD_DIMS:
        known = ", ".join(str(a) if a == b else f"{a} (values {b})" for a, b in HEAD_DIMS)
        return f"it supports head_dim {known}, not {q.shape[3]} (values {v.shape[3]})"
    return _few(q)


def _few(q: Array) -> str | None:
    """Why a flash kernel is not worth it; None if it may be."""
    return f"{q.shape[1]} queries would leave most of a tile empty" if q.shape[1] < FEW else None


def _tiles() -> Tiles:
    scope = current()
    return Tiles() if scope is None else replace(tiles_for(scope.placement.chip), cores=cores())


def _check(q: Array, k: Array, v: Array, config: AttentionConfig, inputs: AttentionInputs) -> None:
    """Raises `UserError` for operands whose shapes do not match."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if k.shape[:3] != v.shape[:3]:
        raise UserError(f"attention: keys are {_shape(k)} and values {_shape(v)}; only the last may differ")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UserError(f"attention: queries are {_shape(q)} and keys {_shape(k)}; batch and head_dim must be equal")
    if heads % kv_heads:
        raise UserError(f"attention: {heads} heads are not a multiple of {kv_heads} kv_heads")
    if config.soft_cap is not None and config.soft_cap <= 0:
        raise UserError(f"attention: soft_cap is {config.soft_cap}; must be above 0, or None")
    for name, x in (("sinks", inputs.sinks), ("alibi_slopes", inputs.alibi_slopes)):
        if x is not None and x.shape != (heads,):
            raise UserError(f"attention: {name} are {_shape(x)}; there are {heads} heads, one number each")
    distances = (heads, 2 * k.shape[1] - 1)
    if inputs.distance_bias is not None and inputs.distance_bias.shape != distances:
        raise UserError(
            f"attention: distance_bias is {_shape(inputs.distance_bias)}; must be {' × '.join(map(str, distances))}, "
            f"for {heads} heads and the distances of {k.shape[1]} keys"
        )
    for x, documents in zip((q, k), inputs.documents or (), strict=False):
        if documents.shape != x.shape[:2]:
            raise UserError(f"attention: documents are {_shape(documents)} for {x.shape[0]} sequences of {x.shape[1]}")


def _shape(x: Array) -> str:
    return " × ".join(map(str, x.shape))
