"""Attention on TPUs by JAX's splash attention: flash attention whose grid leaves out the blocks that nobody sees.

`jax.experimental.pallas.ops.tpu.splash_attention`, after Dao (arXiv:2307.08691). Rows of keys of their own group of
heads; documents as segment ids; forward and backward kernels.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from axon.kernels.attention.mask import Both, Causal, Documents, Everything, Mask, SameDocument, Window

LANES = 128
"""Blocks of queries and of keys are multiples of it."""

BLOCK = 1024
"""Queries and keys a block, at most: 1024 × 1024 float32 scores and the operands fit the default VMEM of every TPU."""

HEAD_DIMS = (64, 128, 256)
"""Widths of a head that were compiled for v5e, v5p and v6e."""

NAME = "attention"
"""The `checkpoint_name` of what the backward needs of the forward: the output, and each query's log-sum-exp."""


def unfit(q: Array, k: Array, mask: Mask) -> str | None:
    """Why the kernel cannot do this attention of queries from the row's first on; None if it can."""
    queries, keys, width = q.shape[1], k.shape[1], q.shape[3]
    if queries != keys:
        return f"splash attention wants as many queries as keys, not {queries} and {keys}"
    if queries % LANES:
        return f"splash attention wants a sequence that {LANES} divides, not {queries}"
    if width not in HEAD_DIMS:
        return f"splash attention wants a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {width}"
    strange = [rule for rule in _rules(mask) if not isinstance(rule, Causal | Window | SameDocument | Everything)]
    return f"splash attention has no mask {strange[0]}" if strange else None


def attention_splash(
    q: Array, k: Array, v: Array, mask: Mask, documents: Documents, scale: float, interpret: bool = False
) -> Array:
    """See `axon.kernels.attention.attention`. Every query must see its own key at least, as it does in training."""
    heads, length = q.shape[2], q.shape[1]
    kernel: Any = splash.make_splash_mha(
        masks.MultiHeadMask([_local(mask, length)] * heads),
        block_sizes=_blocks(length),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=NAME,
        interpret=interpret,
    )
    q, k, v = (x.swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v))
    apart = documents is not None and any(isinstance(rule, SameDocument) for rule in _rules(mask))
    segments = splash.SegmentIds(*documents) if documents is not None and apart else None
    out: Any = jax.vmap(kernel)(q, k, v, segments)
    return jnp.swapaxes(out, 1, 2)


def _rules(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, Both):
        yield from _rules(mask.one)
        yield from _rules(mask.other)
    else:
        yield mask


def _local(mask: Mask, length: int) -> masks.Mask:
    """What places of query and key say of a mask: how far back, and how far ahead, a query sees."""
    rules = list(_rules(mask))
    sizes = [rule.size for rule in rules if isinstance(rule, Window)]
    causal = any(isinstance(rule, Causal) for rule in rules)
    shape = (length, length)
    if sizes:
        return masks.LocalMask(shape, (min(sizes) - 1, 0 if causal else None), offset=0)
    return masks.CausalMask(shape) if causal else masks.FullMask(shape)


def _blocks(length: int) -> splash.BlockSizes:
    """The largest block up to `BLOCK` that divides the sequence; backwards a kernel for dq, one for dk and dv."""
    block = next(size for size in range(min(BLOCK, length), 0, -LANES) if length % size == 0)
    compute = 512 if block % 512 == 0 else block
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=block,
        block_kv_dq=block,
    )
