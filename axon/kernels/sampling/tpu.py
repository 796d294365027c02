"""The least logit that top-k and top-p keep, on a TPU: the search of `search.py`, with the rows in VMEM.

A program's step takes a few requests' whole rows to VMEM, once, and does all passes there. Their powers (what top-p
adds up) are computed once, and stay in VMEM too. Plain XLA reads the logits from HBM in every pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.kernels.sampling.rules import Rules
from axon.kernels.sampling.search import search
from axon.kernels.sampling.xla import top_k_steps, top_p_steps

ROWS = 8
"""Requests a step: the rows of a register."""

CHUNK = 2048
"""Tokens of each row that are looked at together: 16 registers, which are added up side by side."""

VMEM = 48 * 2**20
"""Bytes that rows, the next rows and powers may take: a v7x has 64 MiB, the others more."""


def unfit(logits: Array) -> str | None:
    """Why the kernel cannot do these logits; None if it can."""
    needed = _vmem(*logits.shape)
    return f"{needed:,} bytes of VMEM for rows of {logits.shape[1]}, over {VMEM:,}" if needed > VMEM else None


def least_kept_tpu(logits: Array, rules: Rules, *, interpret: Any = False) -> Array:
    """`batch`; see `axon.kernels.sampling.sample`. logits: `batch vocab`, float32."""
    batch, vocab = logits.shape
    rows = min(ROWS, batch)
    steps = jnp.stack([top_k_steps(logits, rules), top_p_steps(rules)]).astype(jnp.int32)
    columns = [a.astype(jnp.float32)[:, None] for a in (rules.top_k, rules.top_p, rules.top, rules.divisor)]
    column = pl.BlockSpec((rows, 1), lambda i: (i, 0))
    least = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((batch, 1), jnp.float32),
        grid=(pl.cdiv(batch, rows),),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((rows, vocab), lambda i: (i, 0)),
            *([column] * len(columns)),
        ],
        out_specs=column,
        scratch_shapes=[pltpu.VMEM((rows, vocab), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=_vmem(batch, vocab) + 2**20
        ),
        interpret=interpret,
        name="sampling",
    )(steps, logits, *columns)
    return least[:, 0]


def _kernel(steps, logits, top_k, top_p, top, divisor, least, powers):
    shape, vocab = least.shape, logits.shape[1]

    def count(value):
        return _sum(vocab, lambda part, value: jnp.where(logits[:, part] >= value, 1.0, 0.0), value)

    def mass(value):
        return _sum(vocab, lambda part, value: jnp.where(logits[:, part] >= value, powers[:, part], 0.0), value)

    def power(part, kth, top, divisor):
        all_powers = jnp.exp((logits[:, part] - top) / divisor)
        powers[:, part] = jnp.where(logits[:, part] >= kth, all_powers, 0.0)
        return powers[:, part]

    kth = search(lambda value: count(value) >= top_k[...], shape, steps[0])
    least[...] = kth

    @pl.when(steps[1] > 0)
    def _():
        wanted = top_p[...] * _sum(vocab, power, kth, top[...], divisor[...])
        nucleus = search(lambda value: mass(value) >= wanted, shape, steps[1])
        least[...] = jnp.where(top_p[...] < 1, jnp.maximum(kth, nucleus), kth)


def _sum(vocab: int, term: Callable[..., Array], *columns: Array) -> Array:
    """Over the vocabulary, the sum of `term(part, *columns)`, `rows 1`.

    `term` takes a slice of tokens, and the `columns`, `rows 1`, broadcast over as many: once, not in each iteration.
    """
    rows, whole = columns[0].shape[0], vocab // CHUNK
    total = jnp.zeros((rows, 1), jnp.float32)
    if whole:
        wide = [jnp.broadcast_to(column, (rows, CHUNK)) for column in columns]

        def add(i, sums):
            return sums + term(pl.ds(pl.multiple_of(i * CHUNK, CHUNK), CHUNK), *wide)

        sums = lax.fori_loop(0, whole, add, jnp.zeros((rows, CHUNK), jnp.float32))
        total += jnp.sum(sums, axis=1, keepdims=True)
    if rest := vocab - whole * CHUNK:
        total += jnp.sum(term(pl.ds(whole * CHUNK, rest), *columns), axis=1, keepdims=True)
    return total


def _vmem(batch: int, vocab: int) -> int:
    """Bytes of the rows, of the next ones, and of the powers, in tiles of 8 × 128."""
    return 3 * -(-min(batch, ROWS) // 8) * 8 * -(-vocab // 128) * 128 * 4
