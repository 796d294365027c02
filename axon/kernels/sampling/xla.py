"""The least logit that top-k and top-p keep, by a search for it: a pass over the logits a bit, no sort.

A sort of a vocabulary is some 150 passes of compare and exchange on a TPU, and slow on a CPU; here each search is 32
passes that only count or add up, none where no request asks for it.
"""

import jax.numpy as jnp
from jax import Array

from axon.kernels.sampling.rules import Rules
from axon.kernels.sampling.search import STEPS, search


def least_kept_xla(logits: Array, rules: Rules) -> Array:
    """`batch`; see `axon.kernels.sampling.sample`. logits: `batch vocab`, float32."""

    def many(value):
        return jnp.sum(logits >= value, axis=1, keepdims=True, dtype=jnp.int32) >= rules.top_k[:, None]

    kth = search(many, (logits.shape[0], 1), top_k_steps(logits, rules))
    powers = jnp.where(logits >= kth, rules.powers(logits), 0)
    wanted = rules.top_p[:, None] * jnp.sum(powers, axis=1, keepdims=True)

    def enough(value):
        return jnp.sum(jnp.where(logits >= value, powers, 0), axis=1, keepdims=True) >= wanted

    nucleus = search(enough, kth.shape, top_p_steps(rules))
    return jnp.where(rules.top_p[:, None] < 1, jnp.maximum(kth, nucleus), kth)[:, 0]


def top_k_steps(logits: Array, rules: Rules) -> Array:
    """How many steps the search for top-k needs: none where no request has one."""
    return jnp.where(jnp.any(rules.top_k < logits.shape[1]), STEPS, 0)


def top_p_steps(rules: Rules) -> Array:
    """How many steps the search for top-p needs: none where no request has one."""
    return jnp.where(jnp.any(rules.top_p < 1), STEPS, 0)
