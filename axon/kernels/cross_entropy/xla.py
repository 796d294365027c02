"""Cross-entropy in blocks of tokens, with its gradients made in the same pass.

Each block's logits live only while its loss and its two gradients are computed, so that no recomputation is needed
and the work is that of the naive form: three products of `tokens × embed × vocab`. (The idea of making the gradient
in the forward pass is that of Liger kernels, Hsu et al., arXiv:2410.10989.)

A vocabulary may be split over devices: `axes` names the mesh axes, and only maxima and sums over tokens travel.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.axes.patterns import Names
from axon.kernels.choice import platform

CPU_BLOCK = 2**24
"""Bytes of float32 logits a block, about, that a CPU's cache has room for."""

CPU_TOKENS = 128
"""Tokens a block on a CPU, at least: with fewer, reading and writing the head's gradient takes longer than the products
(1,024 tokens, embed 256, vocab 131,072: 4.7 s of processor time with 64, 4.0 with 128, 3.9 with 256)."""

CPU_PART = 2**24
"""Bytes of the head's gradient, about, that a CPU adds to at a time: the product that is added is an array there."""

ACCELERATOR_BLOCK = 2**29
"""The same where each block reads and writes the head's whole gradient: on a v5e, 2,048 tokens of Llama 3's vocabulary
take 997 Mcyc at 2**24, and 65 at 2**30 (jax 0.12.0.1, libtpu 0.0.50.1)."""


class Sums(NamedTuple):
    """Over tokens, in nats: what is differentiated, `Σ weight·(nll + z_loss·lse²)`, and `Σ weight·nll`."""

    objective: Array
    nll: Array


def cross_entropy(
    x: Array,
    head: Array,
    targets: Array,
    weights: Array,
    *,
    z_loss: float = 0.0,
    vocab: int | None = None,
    axes: Names = (),
) -> Sums:
    """The loss of logits `x·head`, on one device's shard.

    Args:
        x: `tokens embed`; head: `embed vocab`, this device's columns; targets: `tokens`, ids; weights: `tokens`.
        z_loss: weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5).
        vocab: how many of the head's columns, on all devices, stand for ids; None for all.
        axes: mesh axes that split `vocab`, in a manual region.
    """

    def block(sums, part):
        x, targets, weights = part
        made = _block(head, x, targets, weights, z_loss, vocab, axes)
        return Sums(sums.objective + made.sums.objective, sums.nll + made.sums.nll), None

    zero = jnp.zeros((), jnp.float32)
    return lax.scan(block, Sums(zero, zero), _parts(x, targets, weights, head.shape[1]))[0]


def cross_entropy_and_gradients(
    x: Array,
    head: Array,
    targets: Array,
    weights: Array,
    *,
    z_loss: float = 0.0,
    vocab: int | None = None,
    axes: Names = (),
    accumulate: Any = jnp.float32,
) -> tuple[Sums, Array, Array]:
    """As `cross_entropy`, with the objective's gradients for `x` and, summed in `accumulate`, for `head`.

    With a split vocabulary that for `x` is this device's part of a sum over `axes`, left to whoever needs it.
    """

    def block(carry, part):
        sums, dhead = carry
        x, targets, weights = part
        made = _block(head, x, targets, weights, z_loss, vocab, axes)
        rate = weights * (1 + 2 * z_loss * made.lse)
        dlogits = rate[:, None] * made.probabilities - jnp.where(made.hit, weights[:, None], 0)
        dlogits = dlogits.astype(x.dtype)
        dx = lax.dot_general(dlogits, head, (((1,), (1,)), ((), ())))
        dhead = _add_product(dhead, x, dlogits)
        return (Sums(sums.objective + made.sums.objective, sums.nll + made.sums.nll), dhead), dx

    zero = jnp.zeros((), jnp.float32)
    begin = (Sums(zero, zero), jnp.zeros(head.shape, accumulate))
    (sums, dhead), dx = lax.scan(block, begin, _parts(x, targets, weights, head.shape[1]))
    return sums, dx.reshape(-1, x.shape[1])[: x.shape[0]], dhead


class _Block(NamedTuple):
    sums: Sums
    lse: Array  # tokens
    probabilities: Array  # tokens vocab
    hit: Array  # tokens vocab: whether the column is the target


def _block(
    head: Array, x: Array, targets: Array, weights: Array, z_loss: float, vocab: int | None, axes: Names
) -> _Block:
    held = head.shape[1]
    first = lax.axis_index(axes) * held if axes else 0
    columns = first + lax.broadcasted_iota(jnp.int32, (1, held), 1)
    logits = lax.dot_general(x, head, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    if vocab is not None:
        logits = jnp.where(columns < vocab, logits, jnp.finfo(jnp.float32).min)
    hit = columns == targets[:, None]
    logits, label = _label(logits, hit, targets - first)
    label = _over(axes, lax.psum, label)
    top = _over(axes, lax.pmax, jnp.max(logits, axis=1, keepdims=True))
    powers = jnp.exp(logits - top)
    total = _over(axes, lax.psum, jnp.sum(powers, axis=1, keepdims=True))
    lse = (top + jnp.log(total))[:, 0]
    nll = jnp.sum(weights * (lse - label))
    return _Block(Sums(nll + z_loss * jnp.sum(weights * lse**2), nll), lse, powers / total, hit)


def _label(logits: Array, hit: Array, place: Array) -> tuple[Array, Array]:
    """The logits, and each token's at its target: 0 where that is not among these columns.

    The sum over `hit` is one more term of a pass that a TPU makes anyway. A CPU would write its summands first; there
    the logit is read at its place, before the logits are used further, so that their powers can overwrite them.
    """
    if platform() != "cpu":
        return logits, jnp.sum(jnp.where(hit, logits, 0), axis=1)
    held = (place >= 0) & (place < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(held, place, 0)[:, None], axis=1)[:, 0]
    return lax.optimization_barrier((logits, jnp.where(held, picked, 0)))


def _add_product(dhead: Array, x: Array, dlogits: Array) -> Array:
    """`dhead + xᵀ·dlogits`. On a CPU in parts of the columns, as the product is not added while it is made.

    There `x` is transposed first, held apart from the product: XLA's CPU matmul is half as fast, or two thirds, with a
    transposed left operand (384 × 512 × 8,192 and near, jax 0.10.2).
    """
    parts = _column_parts(dhead)
    width = dhead.shape[1] // parts
    x, tokens = (lax.optimization_barrier(x.T), 1) if platform() == "cpu" else (x, 0)

    def product(dlogits):
        return lax.dot_general(x, dlogits, (((tokens,), (0,)), ((), ())), preferred_element_type=dhead.dtype)

    def add(i, dhead):
        own = product(lax.dynamic_slice_in_dim(dlogits, i * width, width, 1))
        own += lax.dynamic_slice_in_dim(dhead, i * width, width, 1)
        return lax.dynamic_update_slice_in_dim(dhead, own, i * width, 1)

    return dhead + product(dlogits) if parts == 1 else lax.fori_loop(0, parts, add, dhead)


def _column_parts(dhead: Array) -> int:
    """Into how many parts to cut the head's columns; into one where they cannot be cut evenly."""
    wanted = -(-dhead.size * dhead.dtype.itemsize // CPU_PART) if platform() == "cpu" else 1
    return next((n for n in range(wanted, 2 * wanted) if dhead.shape[1] % n == 0), 1)


def _over(axes: Names, collective: Callable[..., Array], value: Array) -> Array:
    return collective(value, axes) if axes else value


def _parts(x: Array, targets: Array, weights: Array, vocab: int) -> tuple[Array, ...]:
    blocks = _count(x.shape[0], vocab)
    return tuple(_cut(a, blocks) for a in (x, targets, weights))


def _count(tokens: int, vocab: int) -> int:
    """Blocks to cut `tokens` into: at least two, unless there is nothing to cut, and evenly where that is near."""
    block = max(CPU_BLOCK, CPU_TOKENS * vocab * 4) if platform() == "cpu" else ACCELERATOR_BLOCK
    wanted = min(tokens, max(2, -(-tokens * vocab * 4 // block)))
    return next((n for n in range(wanted, 2 * wanted) if tokens % n == 0), wanted)


def _cut(x: Array, blocks: int) -> Array:
    """`tokens …` → `blocks tokens …`; tokens that are made up to fill the last block are zeros, and weigh nothing."""
    size = -(-x.shape[0] // blocks)
    if missing := blocks * size - x.shape[0]:
        x = jnp.pad(x, ((0, missing), *((0, 0) for _ in x.shape[1:])))
    return x.reshape(blocks, size, *x.shape[1:])
