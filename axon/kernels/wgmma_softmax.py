"""The online softmax of the Hopper kernels (Milakov and Gimelshein, arXiv:1805.02867), in base 2, in registers."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.kernels.wgmma import along_rows, filled, zeros

LOG2E = math.log2(math.e)

LEAST = -1e30
"""Where the running maximum begins: finite, so that a row that has seen nothing has weights of zero."""


class Running(NamedTuple):
    """Of each row: the largest score so far, and the sums of 2^(score − top) and of that times the values."""

    top: Array
    total: Array
    sums: Array

    @classmethod
    def begin(cls, rows: int, width: int) -> "Running":
        """Before any key, for values of a width."""
        return cls(filled(rows, LEAST), filled(rows, 0.0), zeros(rows, width))

    def meet(self, scores: Array, factor: float) -> tuple["Running", Array]:
        """Weights of `scores[rows keys]`, times `factor` in base 2; and the sums, yet without their values."""
        peak = jnp.maximum(self.top, jnp.max(scores, axis=1) * factor)
        fading = jnp.exp2(self.top - peak)
        weights = jnp.exp2(scores * factor - along_rows(peak, scores.shape[1]))
        total = self.total * fading + jnp.sum(weights, axis=1)
        return Running(peak, total, self.sums * along_rows(fading, self.sums.shape[1])), weights

    def merge(self, other: "Running") -> "Running":
        """Of the keys of both."""
        peak = jnp.maximum(self.top, other.top)
        mine, theirs = jnp.exp2(self.top - peak), jnp.exp2(other.top - peak)
        width = self.sums.shape[1]
        sums = self.sums * along_rows(mine, width) + other.sums * along_rows(theirs, width)
        return Running(peak, self.total * mine + other.total * theirs, sums)

    def finish(self, nothing: float) -> tuple[Array, Array]:
        """Each row's output, and its log-sum-exp; 0 and `nothing` for one that has seen no key."""
        seen = self.total > 0
        total = jnp.where(seen, self.total, 1.0)
        out = self.sums * along_rows(jnp.where(seen, 1 / total, 0.0), self.sums.shape[1])
        return out, jnp.where(seen, (self.top + jnp.log2(total)) / LOG2E, nothing)
