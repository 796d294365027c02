"""The head of a language model: what makes logits of the last hidden state."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from axon.axes import einsum, shard, stored_array
from axon.checks import check_range
from axon.nn.weight_transform import Operand, Weight


@dataclass(frozen=True)
class Head:
    """A matrix, and what becomes of its products.

    Args:
        matrix: `embed vocab`, or `vocab embed`: an embedding's table (tied).
        vocab: how many columns stand for ids, where the matrix is padded; None for all.
        soft_cap: c of c·tanh(logit / c) (Gemma 2, arXiv:2408.00118); None for none.
    """

    matrix: Weight
    vocab: int | None = None
    soft_cap: float | None = None

    def __post_init__(self):
        check_range(self, "(0, inf)", "soft_cap")

    def array(self, user: str) -> Any:
        """The matrix as it is stored, or as a transform makes it, for an operation that needs it whole."""
        return self.matrix.whole() if isinstance(self.matrix, Operand) else stored_array(self.matrix, user)

    def logits(self, x: Array) -> Array:
        """`batch seq vocab` of `x[batch seq embed]`, all at once: for generation."""
        logits = einsum(f"batch seq embed, {' '.join(self.matrix.axes)} -> batch seq vocab", x, self.matrix)
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        if self.vocab is None:
            return logits
        ids = shard(jnp.arange(logits.shape[-1]), "vocab")
        return jnp.where(ids < self.vocab, logits, jnp.finfo(logits.dtype).min)
