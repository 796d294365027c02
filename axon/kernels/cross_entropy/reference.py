"""Cross-entropy as the formula says it: what the blocked form is compared with."""

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy_reference(
    x: Array, head: Array, targets: Array, weights: Array, z_loss: float = 0.0, vocab: int | None = None
) -> tuple[Array, Array]:
    """`(Σ weight·(nll + z_loss·lse²), Σ weight·nll)` in nats, of logits `x·head`.

    Args:
        x: `tokens embed`; head: `embed vocab`; targets: `tokens`, ids; weights: `tokens`.
        vocab: how many of the head's columns stand for ids; None for all. The others are never predicted.
    """
    logits = (x @ head)[:, :vocab].astype(jnp.promote_types(x.dtype, jnp.float32))
    total = jax.nn.logsumexp(logits, axis=-1)
    nll = total - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jnp.sum(weights * (nll + z_loss * total**2)), jnp.sum(weights * nll)
