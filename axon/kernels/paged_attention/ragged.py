"""Where the rows of a ragged batch are: which sequence a query row belongs to, at which position, on which page."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """What a call says of its sequences and heads; see `axon.kernels.paged_attention.paged_attention`."""

    kv_lens: Array
    page_table: Array
    cu_q_lens: Array
    sinks: Array | None = None
    distance_bias: Array | None = None
    alibi_slopes: Array | None = None

    @property
    def sequences(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def q_lens(self) -> Array:
        """`sequences`: the queries of each."""
        return jnp.diff(self.cu_q_lens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Places:
    """Of each row, `tokens`: is it real, its sequence, and its position there; padding has sequence 0, position 0."""

    real: Array
    sequences: Array
    positions: Array

    def pages(self, inputs: AttentionInputs, page_size: int) -> tuple[Array, Array]:
        """The page and the slot in it where each row's key and value are stored; page 0 for padding."""
        index = jnp.clip(self.positions // page_size, 0, inputs.page_table.shape[1] - 1)
        return jnp.where(self.real, inputs.page_table[self.sequences, index], 0), self.positions % page_size


def places(inputs: AttentionInputs, tokens: int) -> Places:
    """Row j of a sequence with n queries is at position kv_len - n + j."""
    rows = jnp.arange(tokens, dtype=jnp.int32)
    real = rows < inputs.cu_q_lens[-1]
    found = jnp.searchsorted(inputs.cu_q_lens[1:], rows, side="right").astype(jnp.int32)
    sequences = jnp.where(real, found, 0)
    positions = inputs.kv_lens[sequences] - inputs.cu_q_lens[sequences + 1] + rows
    return Places(real, sequences, jnp.where(real, positions, 0))


@dataclass(frozen=True)
class AttentionConfig:
    """How scores are computed and which keys a query sees: constants of the program.

    Args:
        scale: of q·k. window: keys that a query sees, itself included; None for all before it.
        soft_cap: c of c·tanh(score/c) (Gemma 2, arXiv:2408.00118); None for none.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def finish(self, products: Array) -> Array:
        """Scores of the products q·k."""
        scores = products * self.scale
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def seen(self, queries: Array, keys: Array) -> Array:
        """Whether the query at one position sees the key at another."""
        causal = keys <= queries
        return causal if self.window is None else causal & (queries - keys < self.window)
