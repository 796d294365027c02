"""The attentions of known models, forward and backward, as the TPU kernels are compiled for every chip."""

import jax
import jax.numpy as jnp

from axon.kernels.attention.cost import backward_cost, forward_cost
from axon.kernels.attention.mask import Causal, Everything, Mask, Prefix, SameDocument, Window
from axon.kernels.attention.problem import AttentionConfig, AttentionInputs
from axon.kernels.attention.tiles import Tiles
from axon.kernels.attention.tpu import attention_tpu
from axon.kernels.cost import Cost
from scripts.bench.case import Case, Part


def cases(shorter: int = 1) -> list[Case]:
    """Every width of heads, every kind of mask, and each thing that may come with the scores.

    Lengths are divided by `shorter`: smaller tiles, which compile in a fraction of the time.
    """
    documents = Causal() & SameDocument()
    return [
        _case("flash, Llama 3 8B", documents, (1, 8192 // shorter, 32, 8, 128, 128)),
        _case("flash, GPT-2", documents, (8, 1024 // shorter, 12, 12, 64, 64)),
        _case("flash, Phi-3 mini", Causal() & Window(2047), (1, 4096 // shorter, 32, 32, 96, 96)),
        _case("flash, DeepSeek-V3", Causal(), (1, 4096 // shorter, 16, 16, 192, 128)),
        _case(
            "flash, Gemma 2 9B, window, soft cap",
            Causal() & Window(4096),
            (1, 8192 // shorter, 16, 8, 256, 256),
            cap=50.0,
        ),
        _case("flash, gpt-oss, window, sinks", Causal() & Window(128), (1, 4096 // shorter, 64, 8, 64, 64), sinks=True),
        _case("flash, prefix, ALiBi slopes", Prefix(512), (1, 2048 // shorter, 16, 16, 128, 128), alibi_slopes=True),
        _case("flash, float32", Causal(), (1, 2048 // shorter, 8, 8, 64, 64), dtype=jnp.float32),
    ]


def _case(
    name: str,
    mask: Mask,
    sizes: tuple[int, ...],
    dtype=jnp.bfloat16,
    cap: float | None = None,
    sinks: bool = False,
    alibi_slopes: bool = False,
) -> Case:
    """Of `batch seq heads kv_heads head_dim value_dim`."""
    batch, seq, heads, kv_heads, width, value = sizes
    config = AttentionConfig(mask, width**-0.5, cap)

    def step(q, k, v, documents, per_head):
        """Output and gradients."""
        inputs = AttentionInputs(
            (documents, documents), 0, per_head if sinks else None, per_head if alibi_slopes else None
        )
        out, backward = jax.vjp(lambda q, k, v: attention_tpu(q, k, v, config, inputs)[0], q, k, v)
        return out, backward(out)

    operands = (
        jax.ShapeDtypeStruct((batch, seq, heads, width), dtype),
        jax.ShapeDtypeStruct((batch, seq, kv_heads, width), dtype),
        jax.ShapeDtypeStruct((batch, seq, kv_heads, value), dtype),
        jax.ShapeDtypeStruct((batch, seq), jnp.int32),
        jax.ShapeDtypeStruct((heads,), jnp.float32),
    )
    q = jax.ShapeDtypeStruct((batch, kv_heads, heads // kv_heads, seq, width), dtype)
    k, v = (jax.ShapeDtypeStruct((batch, kv_heads, seq, size), dtype) for size in (width, value))
    there, back = forward_cost(mask, q, k, v), backward_cost(mask, q, k, v)
    return Case("attention", name, step, operands, Cost(there.flops + back.flops, there.bytes + back.bytes))


def parts() -> list[Part]:
    """A tile of 1,024 rows and 1,024 keys, forward, and of 512 keys, backward; head_dim 128, bfloat16."""
    masks = {"whole": Everything(), "partial": Causal() & SameDocument()}
    return [_part(way, how, masks[how]) for way in ("forward", "backward") for how in masks]


def _part(way: str, how: str, mask: Mask) -> Part:
    config = AttentionConfig(mask, 128**-0.5)
    tiles = Tiles(rows=1024, keys=1024, backward_rows=1024, backward_keys=512)

    def forward(q, k, v, documents):
        inputs = AttentionInputs((documents, documents) if mask.by_document else None)
        return attention_tpu(q, k, v, config, inputs, tiles=tiles)[0]

    def backward(q, k, v, documents):
        out, gradients = jax.vjp(lambda q, k, v: forward(q, k, v, documents), q, k, v)
        return gradients(out)

    operands = (
        *[jax.ShapeDtypeStruct((1, 4096, 1, 128), jnp.bfloat16)] * 3,
        jax.ShapeDtypeStruct((1, 4096), jnp.int32),
    )
    function, keys, products = {"forward": (forward, 1024, 2), "backward": (backward, 512, 5)}[way]
    flops = 2 * products * 1024 * keys * 128 if how == "whole" else None
    return Part("attention", f"{way}, {how} tile", f"axon_attention_{way}", function, operands, flops)
