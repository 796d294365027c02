"""Cross-entropy by its formula: the reference for the blocked form."""

import jax
import jax.numpy as jnp
from jax import Array


def token_nll_reference(
    x: Array, head: Array, targets: Array, vocab: int | None = None, soft_cap: float | None = None
) -> tuple[Array, Array]:
    """`(nll, lse)` of each token in nats, float32 at least, of logits `x·head`.

    Args:
        x: `tokens embed`; head: `embed vocab`; targets: `tokens`, ids.
        vocab: how many of the head's columns stand for ids; None for all. The others are never predicted.
        soft_cap: c of c·tanh(logit / c); None for none.
    """
    logits = (x @ head)[:, :vocab].astype(jnp.promote_types(x.dtype, jnp.float32))
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0], lse


def cross_entropy_reference(
    x: Array,
    head: Array,
    targets: Array,
    weights: Array,
    z_loss: float = 0.0,
    vocab: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Array, Array]:
    """`(Σ weight·(nll + z_loss·lse²), Σ weight·nll)` over `weights[tokens]`; else as `token_nll_reference`."""
    nll, lse = token_nll_reference(x, head, targets, vocab, soft_cap)
    return jnp.sum(weights * (nll + z_loss * lse**2)), jnp.sum(weights * nll)
