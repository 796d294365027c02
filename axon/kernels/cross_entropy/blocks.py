"""Blocks of tokens: how many, so that the logits of one block are all that there ever are."""

import jax.numpy as jnp
from jax import Array

from axon.axes import platform

CPU_BLOCK = 2**24
"""Bytes of float32 logits a block, about, that a CPU's cache has room for."""

CPU_TOKENS = 128
"""Tokens a block on a CPU, at least: with fewer, reading and writing the head's gradient takes longer than the products
(1,024 tokens, embed 256, vocab 131,072: 4.7 s of processor time with 64, 4.0 with 128, 3.9 with 256)."""

ACCELERATOR_BLOCK = 2**29
"""The same where each block reads and writes the head's whole gradient: on a v5e, 2,048 tokens of Llama 3's vocabulary
take 997 Mcyc at 2**24, and 65 at 2**30 (jax 0.12.0.1, libtpu 0.0.50.1)."""


def cut(vocab: int, *arrays: Array) -> tuple[Array, ...]:
    """Each `tokens …` as `blocks tokens …`; what fills the last block is zeros.

    `vocab` is the number of columns that this device makes logits of.
    """
    blocks = _count(arrays[0].shape[0], vocab)
    return tuple(_cut(a, blocks) for a in arrays)


def join(x: Array, tokens: int) -> Array:
    """`blocks tokens …` as `tokens …`, without what filled the last block."""
    return x.reshape(-1, *x.shape[2:])[:tokens]


def _count(tokens: int, vocab: int) -> int:
    """Blocks to cut `tokens` into: at least two, unless there is nothing to cut, and evenly where that is near."""
    block = max(CPU_BLOCK, CPU_TOKENS * vocab * 4) if platform() == "cpu" else ACCELERATOR_BLOCK
    wanted = min(tokens, max(2, -(-tokens * vocab * 4 // block)))
    return next((n for n in range(wanted, 2 * wanted) if tokens % n == 0), wanted)


def _cut(x: Array, blocks: int) -> Array:
    size = -(-x.shape[0] // blocks)
    if missing := blocks * size - x.shape[0]:
        x = jnp.pad(x, ((0, missing), *((0, 0) for _ in x.shape[1:])))
    return x.reshape(blocks, size, *x.shape[1:])
