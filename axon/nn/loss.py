"""Losses of a head over a vocabulary that may be split over devices: the training objective, and each token's loss."""

import jax
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from axon import axes
from axon.axes.memory_order import row_major
from axon.errors import UserError
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

    The first result's gradients for `x` and the head are made with it: three products where `token_nll` needs four.
    The second has none: differentiating it raises `UserError`, as does differentiating for weights. Logits exist for
    one block of tokens at a time, each device's own tokens and its own columns of the vocabulary.
    """
    scope = axes.current()
    if scope is None:
        flat = (x.reshape(-1, x.shape[-1]), _embed_by_vocab(head), targets.reshape(-1), weights.reshape(-1))
        return kernel.cross_entropy_reference(*flat, z_loss, head.vocab, head.soft_cap)
    choose("cross_entropy", {"xla": None}, "in blocks of tokens")
    split = SplitVocab(scope, head, targets.size)

    @jax.custom_vjp
    def apply(x, w, weights):
        return split.sums(x, w, targets, weights, z_loss)

    def forward(x, w, weights):
        if weights.perturbed:
            raise UserError(f"cross_entropy: a gradient is asked for its weights, and it makes none. {_INSTEAD}")
        x, w = x.value, w.value
        *sums, dx, dw = split.sums_and_gradients(x, w, targets, weights.value, z_loss)
        # Tied together, or the head's gradient waits unreduced, and whole, until the end of the backward.
        return tuple(sums), lax.optimization_barrier(_cotangents(dx, x, dw, w))

    def backward(gradients, cotangents):
        of_objective, of_nll = cotangents
        if not isinstance(of_nll, SymbolicZero):
            raise UserError(
                f"cross_entropy: its second result, nll, has no gradient, and one is asked of it. {_INSTEAD}"
            )
        return *(axes.scaled(g, of_objective) for g in gradients), None

    apply.defvjp(forward, backward, symbolic_zeros=True)
    return apply(x, head.matrix.get_value(), weights)


@jax.named_scope("loss")
def token_nll(x: Array, head: Head, targets: Array) -> tuple[Array, Array]:
    """`(nll, lse)` of each token in nats, `batch seq` float32: `nll = lse − logit of the target`.

    Args:
        x: `batch seq embed`; head: what makes logits of it; targets: `batch seq`, ids.

    Differentiable by any cotangent of both. Logits exist for one block of tokens at a time, each device's own tokens
    and its own columns of the vocabulary; the backward makes them again, so that nothing but `x`, the stored head and
    `lse` is kept for it.
    """
    scope = axes.current()
    if scope is None:
        found = kernel.token_nll_reference(
            x.reshape(-1, x.shape[-1]), _embed_by_vocab(head), targets.reshape(-1), head.vocab, head.soft_cap
        )
        return found[0].reshape(targets.shape), found[1].reshape(targets.shape)
    choose("cross_entropy", {"xla": None}, "token by token, in blocks of tokens")
    split = SplitVocab(scope, head, targets.size)

    @jax.custom_vjp
    def apply(x, w):
        return split.token_nll(x, w, targets)

    def forward(x, w):
        nll, lse = apply(x, w)
        return (nll, lse), (x, w, lse)

    def backward(residuals, cotangents):
        x, w, lse = residuals
        dx, dw = split.token_nll_gradients(x, w, targets, lse, *cotangents)
        return _cotangents(dx, x, dw, w)

    apply.defvjp(forward, backward)
    return apply(x, head.matrix.get_value())


def _cotangents(dx: Array, x: Array, dw: Array, w: Array) -> tuple[Array, Array]:
    """Gradients for `x` and the stored head `w`, of which other devices may have a part, where each is wanted."""
    with jax.named_scope("gradients"):  # which `cross_entropy` makes in the forward already: so `axon show` says
        dx = axes.reshard(dx, jax.typeof(x).sharding.spec) if axes.current_explicit() else dx
    return dx.astype(x.dtype), _row_major(axes.as_cotangent(dw, w))


def _row_major(gradient: Array) -> Array:
    """The gradient in the memory order of its parameter. An all-to-all would leave it in another, and XLA would copy
    parameter and moments to follow it (0.37 GiB of Llama 3 8B on 16 v5e, libtpu 0.0.50.1)."""
    scope = axes.current()
    if scope is None or scope.placement.platform == "cpu":
        return gradient
    return row_major(gradient)


def _embed_by_vocab(head: Head) -> Array:
    value = head.matrix.get_value()
    return value.T if head.matrix.axes[0] == "vocab" else value
