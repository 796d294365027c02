"""Attentions over parts of a sequence's pages as one, exactly, by their log-sum-exp (FlashDecoding)."""

import jax
import jax.numpy as jnp
from jax import Array


def merge(out: Array, lse: Array) -> Array:
    """Parts `splits …` as one: Σ exp(lse_i − lse)·out_i, with lse the log-sum-exp of all; `lse` is finite."""
    weights = jax.nn.softmax(lse, axis=0)
    return jnp.sum(weights * out, axis=0)
