"""Losses of a head over a vocabulary that may be split over devices: the training objective, and each token's loss."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon import axes
from axon.axes import StoredWeight
from axon.kernels import cross_entropy as kernel
from axon.kernels.choice import choose
from axon.nn.head import Head
from axon.nn.split_vocab import SplitVocab

_INSTEAD = (
    "Differentiate its first result for x and the head; or use axon.nn.token_nll, whose gradient any function has"
)


@jax.named_scope("loss")
def cross_entropy(x: Array, head: Head, targets: Array, weights: Array, z_loss: float = 0.0) -> tuple[Array, Array]:
    """`(Σ weight·(nll + z_loss·lse²), Σ weight·nll)` over all tokens of the global batch, in nats, float32.

    Args:
        x: `batch seq embed`; head: what makes logits of it.
        targets: `batch seq`, ids; weights: `batch seq`, 0 for padding.

    The first result's gradients for `x` and the head are made with it: three products where `token_nll` needs four; one
    less each where the head is frozen.
    The second has none: differentiating it raises `UserError`, as does differentiating for weights. Logits exist for
    one block of tokens at a time, each device's own tokens and its own columns of the vocabulary.
    """
    matrix, scope = head.array("cross_entropy"), axes.current()
    if scope is None:
        flat = _flat(x, matrix, head, targets, weights)
        return kernel.cross_entropy_reference(*flat, z_loss=z_loss, vocab=head.vocab, soft_cap=head.soft_cap)
    choose("cross_entropy", {"xla": None}, "in blocks of tokens")
    weights = axes.refuse_gradient(
        weights, f"cross_entropy: a gradient is asked for its weights, and it makes none. {_INSTEAD}"
    )
    operation = _CrossEntropy(SplitVocab(scope, head, matrix.shape, targets.size), z_loss)
    objective, nll = axes.use_weight(scope, operation, matrix, x, targets, weights)
    return objective, axes.refuse_gradient(
        nll, f"cross_entropy: its second result, nll, has no gradient, and one is asked of it. {_INSTEAD}"
    )


@jax.named_scope("loss")
def token_nll(x: Array, head: Head, targets: Array) -> tuple[Array, Array]:
    """`(nll, lse)` of each token in nats, `batch seq` float32: `nll = lse − logit of the target`.

    Args:
        x: `batch seq embed`; head: what makes logits of it; targets: `batch seq`, ids.

    Differentiable by any cotangent of both. Logits exist for one block of tokens at a time, each device's own tokens
    and its own columns of the vocabulary; the backward makes them again, so that nothing but `x`, the stored head and
    `lse` is kept for it.
    """
    matrix, scope = head.array("token_nll"), axes.current()
    if scope is None:
        flat = _flat(x, matrix, head, targets)
        found = kernel.token_nll_reference(*flat, vocab=head.vocab, soft_cap=head.soft_cap)
        return found[0].reshape(targets.shape), found[1].reshape(targets.shape)
    choose("cross_entropy", {"xla": None}, "token by token, in blocks of tokens")
    return axes.use_weight(scope, _TokenNLL(SplitVocab(scope, head, matrix.shape, targets.size)), matrix, x, targets)


class _CrossEntropy(axes.Operation):
    """The sums over all tokens; what is kept for the backward are the gradients of the first."""

    def __init__(self, split: SplitVocab, z_loss: float):
        self.split, self.z_loss = split, z_loss

    def result(self, weight: StoredWeight, *operands: Array) -> Any:
        x, targets, weights = operands
        return self.split.sums(x, weight, targets, weights, self.z_loss)

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Any, Any]:
        x, targets, weights = operands
        *sums, dx, dw = self.split.sums_and_gradients(x, weight, targets, weights, self.z_loss)
        with jax.named_scope("gradients"):  # made in the forward already: so `axon show` tells them apart
            dx = axes.like_operand(dx, jax.typeof(x))
        # Tied together, or the head's gradient waits unreduced, and whole, until the end of the backward.
        gradients = lax.optimization_barrier((dx, head_cotangent(weight, dw)))
        return tuple(sums), (*gradients, jnp.zeros_like(weights))

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Any) -> Any:
        dx, dw, none = saved
        of_head = None if dw is None else axes.scaled(dw, cotangent[0])
        return of_head, axes.scaled(dx, cotangent[0]), None, none


class _TokenNLL(axes.Operation):
    """The loss of each token."""

    def __init__(self, split: SplitVocab):
        self.split = split

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Any, Any]:
        x, targets = operands
        nll, lse = self.split.token_nll(x, weight, targets)
        return (nll, lse), (x, targets, lse)

    def backward(self, weight: StoredWeight, saved: Any, cotangent: Any) -> Any:
        x, targets, lse = saved
        of_nll, of_lse = (jnp.zeros_like(lse) if ct is None else ct for ct in cotangent)
        dx, dw = self.split.token_nll_gradients(x, weight, targets, lse, of_nll, of_lse)
        return head_cotangent(weight, dw), dx, None


def _flat(x: Array, matrix: Array, head: Head, *by_token: Array) -> tuple[Array, ...]:
    """`tokens embed`, `embed vocab`, and each of `by_token` as `tokens`."""
    matrix = matrix.T if head.matrix.axes[0] == "vocab" else matrix
    return x.reshape(-1, x.shape[-1]), matrix, *(value.reshape(-1) for value in by_token)


def head_cotangent(weight: StoredWeight, dw: Array | None) -> Array | None:
    """The head's, row-major as its parameter is, None where it is frozen. An all-to-all would leave it in another
    order, and XLA would copy parameter and moments to follow it (0.37 GiB of Llama 3 8B on 16 v5e, libtpu 0.0.50.1)."""
    return None if dw is None else axes.row_major(weight.cotangent(dw))
