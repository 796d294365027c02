"""The least logit that top-k and top-p keep, by sorting: what the search for it is compared with."""

import jax.numpy as jnp
from jax import Array

from axon.kernels.sampling.rules import Rules


def least_kept_reference(logits: Array, rules: Rules) -> Array:
    """`batch`; see `axon.kernels.sampling.sample`. logits: `batch vocab`, float32."""
    falling = -jnp.sort(-logits, axis=1)
    kth = jnp.take_along_axis(falling, rules.top_k[:, None] - 1, axis=1)
    powers = jnp.where(falling >= kth, rules.powers(falling), 0)
    before = jnp.cumsum(powers, axis=1) - powers
    wanted = (rules.top_p * jnp.sum(powers, axis=1))[:, None]
    kept = (falling >= kth) & ((before < wanted) | (rules.top_p[:, None] == 1))
    return jnp.min(jnp.where(kept, falling, jnp.inf), axis=1)
