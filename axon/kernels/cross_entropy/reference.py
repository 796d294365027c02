"""Cross-entropy as the formula says it: what the blocked form is compared with."""

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy_reference(
    x: Array, head: Array, targets: Array, weights: Array, z_loss: float = 0.0
) -> tuple[Array, Array]:
    """`(Σ weight·(nll + z_loss·lse²), Σ weight·nll)` in nats, of logits `x·head`.

    Args:
        x: `tokens embed`; head: `embed vocab`; targets: `tokens`, ids; weights: `tokens`.
    """
    logits = (x @ head).astype(jnp.promote_types(x.dtype, jnp.float32))
    total = jax.nn.logsumexp(logits, axis=-1)
    nll = total - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jnp.sum(weights * (nll + z_loss * total**2)), jnp.sum(weights * nll)
