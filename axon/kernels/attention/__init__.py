"""Attention: softmax(q·kᵀ·scale)·v under a declarative mask, by the implementation that fits."""

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon.axes import current, notice
from axon.kernels.attention import splash
from axon.kernels.attention.mask import Causal, Everything, Mask, SameDocument, Window
from axon.kernels.attention.reference import attention_reference
from axon.kernels.attention.xla import attention_xla

__all__ = ["Causal", "Everything", "Mask", "SameDocument", "Window", "attention", "attention_reference"]


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    documents: tuple[Array, Array] | None = None,
    start: Array | int = 0,
    scale: float | None = None,
) -> Array:
    """Grouped-query attention on one device's shard (Vaswani et al., arXiv:1706.03762; Ainslie et al., 2305.13245).

    Args:
        q: `batch seq heads head_dim`; k, v: `batch kv_seq kv_heads head_dim`; heads a multiple of kv_heads.
        mask: which keys a query sees, as `Causal() & SameDocument() & Window(4096)`.
        documents: the document of each query and of each key, `batch seq` and `batch kv_seq`.
        start: index of the first query among the keys; traced (a cache's fill) or a constant.
        scale: of the scores; 1/√head_dim by default.

    Returns: `batch seq heads head_dim`, in the dtype of `q`; zeros for a query that sees no key.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: {q.shape[2]} heads are not a multiple of {k.shape[2]} kv_heads")
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    scope = current()
    if scope is not None and scope.placement.platform == "tpu" and isinstance(start, int):
        reason = splash.unfit(q, k, mask) if start == 0 else f"the first query is at {start} among the keys"
        if reason is None:
            notice("attention", f"splash attention, a Pallas kernel, {mask}")
            return splash.attention_splash(q, k, v, mask, documents, scale)  # which names what the backward needs
        notice("attention", f"plain XLA in blocks of queries, {mask}: {reason}")
        return checkpoint_name(attention_xla(q, k, v, mask, documents, start, scale), splash.NAME)
    if isinstance(start, int):
        notice("attention", f"plain XLA in blocks of queries, {mask}")
        return checkpoint_name(attention_xla(q, k, v, mask, documents, start, scale), splash.NAME)
    notice("attention", f"plain reference, {mask}: the first query's place is known only at run time")
    return checkpoint_name(attention_reference(q, k, v, mask, documents, start, scale), splash.NAME)
