"""The rules by which each request of a batch is drawn."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

GREEDY = float(jnp.finfo(jnp.float32).tiny)
"""Temperatures below take the most likely token: a TPU, or a CPU in XLA's hands, may count them as 0."""


class Rules(NamedTuple):
    """Settings by request, each an array `batch`, with values that change nothing where a request has none.

    `top` is its largest logit.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    top: Array

    @staticmethod
    def of(logits: Array, temperature: Array, top_k: Array | None, top_p: Array | None, min_p: Array | None) -> "Rules":
        """For `logits[batch vocab]`; see `axon.kernels.sampling.sample`."""
        batch, vocab = logits.shape
        top_k = jnp.zeros(batch, jnp.int32) if top_k is None else top_k
        top_p = jnp.ones(batch) if top_p is None else top_p
        min_p = jnp.zeros(batch) if min_p is None else min_p
        greedy = temperature < GREEDY  # what takes the most likely token needs no search
        return Rules(
            temperature.astype(jnp.float32),
            jnp.where(greedy | (top_k < 1) | (top_k > vocab), vocab, top_k).astype(jnp.int32),
            jnp.where(greedy, 1, jnp.minimum(top_p, 1)).astype(jnp.float32),
            min_p.astype(jnp.float32),
            jnp.max(logits, axis=1),
        )

    @property
    def divisor(self) -> Array:
        """The temperature, 1 where the most likely token is taken."""
        return jnp.where(self.temperature < GREEDY, 1, self.temperature)

    def powers(self, logits: Array) -> Array:
        """exp((logit − top) ÷ temperature): the probabilities, but for a factor."""
        return jnp.exp((logits - self.top[:, None]) / self.divisor[:, None])

    def least_of(self, least: Array) -> Array:
        """The least logit that min-p keeps of those from `least` on; never above `top`."""
        floor = self.top + self.divisor * jnp.log(self.min_p)
        return jnp.minimum(jnp.maximum(least, floor), self.top)
