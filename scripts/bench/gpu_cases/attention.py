"""The configurations of the Hopper kernels, forward and backward, as they are compiled for an H200."""

from typing import Any

import jax
import jax.numpy as jnp

from axon.kernels.attention.cost import backward_cost, forward_cost
from axon.kernels.attention.gpu import attention_gpu
from axon.kernels.attention.gpu_support import SIZES
from axon.kernels.attention.mask import Causal, Everything, Mask, Prefix, SameDocument, Window
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs
from axon.kernels.cost import Cost
from scripts.bench.case import Case

MASKS = (
    Everything(),
    Causal() & SameDocument(),
    Causal() & Window(1024) & SameDocument(),
    Prefix(512),
)


def gpu_cases() -> list[Case]:
    """Every width of heads with every kind of mask, and with float16."""
    return [
        *(_case(mask, sizes, jnp.bfloat16) for sizes in SIZES for mask in MASKS),
        *(_case(MASKS[1], sizes, jnp.float16) for sizes in SIZES),
    ]


def _case(mask: Mask, sizes: tuple[int, int], dtype: Any, seq: int = 4000, heads: int = 8, kv_heads: int = 2) -> Case:
    """Of a length that is no multiple of a tile, so that keys are padded."""
    width, value = sizes
    config = AttentionConfig(mask, width**-0.5)

    def step(q, k, v, documents):
        """Output and gradients."""
        inputs = AttentionInputs((documents, documents))
        out, backward = jax.vjp(lambda q, k, v: attention_gpu(q, k, v, config, inputs)[0], q, k, v)
        return out, backward(out)

    operands = (
        jax.ShapeDtypeStruct((1, seq, heads, width), dtype),
        jax.ShapeDtypeStruct((1, seq, kv_heads, width), dtype),
        jax.ShapeDtypeStruct((1, seq, kv_heads, value), dtype),
        jax.ShapeDtypeStruct((1, seq), jnp.int32),
    )
    q = jax.ShapeDtypeStruct((1, kv_heads, heads // kv_heads, seq, width), dtype)
    k, v = (jax.ShapeDtypeStruct((1, kv_heads, seq, size), dtype) for size in (width, value))
    there, back = forward_cost(mask, q, k, v), backward_cost(mask, q, k, v)
    name = f"hopper, {width}" + (f"/{value}" if value != width else "") + f", {mask}, {jnp.dtype(dtype).name}"
    return Case("attention", name, step, operands, Cost(there.flops + back.flops, there.bytes + back.bytes))
