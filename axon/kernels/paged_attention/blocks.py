"""Ragged queries as a list of equal blocks: up to `queries` rows of one sequence each, and the pages that they see.

With n_i queries in sequence i there are Σ ⌈n_i / queries⌉ blocks, no more than tokens // queries + sequences, which is
the static size. A block's rows are queries by group: the heads that share one head of keys are contiguous, so that one
product with that head's keys computes all of their scores.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from axon.fields import field_values
from axon.kernels.paged_attention.ragged import AttentionInputs, Places


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["count", "starts", "sequences", "rows", "positions", "sizes"],
    meta_fields=["queries", "in_order"],
)
@dataclass(frozen=True)
class Blocks:
    """The live blocks, then blocks without a query.

    Args:
        queries: rows a block, a constant. count: how many blocks are live, a scalar.
        starts: of each sequence, `sequences`, its first block.
        sequences, rows, positions, sizes: of each block, `blocks`, whose queries it has, the first of them, the
            position of that one, and how many there are.
        in_order: a constant; whether, of blocks of one query, block i has row i.
    """

    queries: int
    count: Array
    starts: Array
    sequences: Array
    rows: Array
    positions: Array
    sizes: Array
    in_order: bool = True

    @property
    def ends(self) -> Array:
        """`blocks`: one past the last position that a block's queries see; 0 for a block without any."""
        return jnp.where(self.sizes > 0, self.positions + self.sizes, 0)

    def first_keys(self, window: int | None) -> Array:
        """`blocks`: the first position that a block's queries see."""
        return jnp.zeros_like(self.positions) if window is None else jnp.maximum(self.positions - window + 1, 0)

    def take(self, some: Array) -> "Blocks":
        """The blocks of these numbers, in this order."""
        arrays = field_values(self, ("sequences", "rows", "positions", "sizes"))
        return replace(self, in_order=False, **{name: array[some] for name, array in arrays.items()})


def blocks(
    inputs: AttentionInputs, tokens: int, queries: int, lens: Array | None = None, most: int | None = None
) -> Blocks:
    """The blocks of a batch of `tokens` rows.

    `lens[sequences]`: of each as many first queries, all by default; `most`: how many blocks these have, at most.
    """
    lens = inputs.q_lens if lens is None else lens
    counts = (lens + queries - 1) // queries
    ends = jnp.cumsum(counts)
    room = min(tokens, tokens // queries + inputs.sequences) if most is None else most
    index = jnp.arange(room, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    owner = jnp.minimum(owner, inputs.sequences - 1)
    inside = (index - (ends - counts)[owner]) * queries
    sizes = jnp.clip(lens[owner] - inside, 0, queries)
    return Blocks(
        queries=queries,
        count=ends[-1],
        starts=ends - counts,
        sequences=owner,
        rows=inputs.cu_q_lens[owner] + inside,
        positions=inputs.kv_lens[owner] - inputs.q_lens[owner] + inside,
        sizes=jnp.where(index < ends[-1], sizes, 0),
    )


def in_blocks(q: Array, plan: Blocks) -> Array:
    """`tokens heads head_dim` → `blocks queries heads head_dim`; queries past a block's size are others'."""
    if plan.queries == 1 and plan.in_order:
        return q[:, None]
    rows = plan.rows[:, None] + jnp.arange(plan.queries)
    return q.at[rows].get(mode="clip")


def split(q: Array, plan: Blocks, kv_heads: int) -> Array:
    """`tokens heads head_dim` → `blocks kv_heads (queries group) head_dim`; rows past a block's size are others'."""
    pattern = "blocks queries (kv_heads group) head_dim -> blocks kv_heads (queries group) head_dim"
    return rearrange(in_blocks(q, plan), pattern, kv_heads=kv_heads)


def join(out: Array, plan: Blocks, where: Places, inputs: AttentionInputs) -> Array:
    """`blocks kv_heads (queries group) head_dim` → `tokens heads head_dim`, zeros for padding."""
    out = rearrange(out, "blocks kv_heads (queries group) d -> blocks kv_heads queries group d", queries=plan.queries)
    if plan.queries == 1:
        out = out[:, :, 0]
    else:
        inside = jnp.arange(where.real.shape[0]) - inputs.cu_q_lens[where.sequences]
        block = plan.starts[where.sequences] + inside // plan.queries
        out = out.at[block, :, inside % plan.queries].get(mode="clip")
    out = rearrange(out, "tokens kv_heads group d -> tokens (kv_heads group) d")
    return jnp.where(where.real[:, None, None], out, 0)


def of_rows(of_heads: Array | None, kv_heads: int, queries: int) -> Array | None:
    """What there is of each head, `heads`, of each row of a block: `kv_heads (queries group)`."""
    return None if of_heads is None else jnp.tile(of_heads.reshape(kv_heads, -1), (1, queries))


def merge(out: Array, lse: Array) -> Array:
    """Parts of a sequence's pages, `splits …`, as one: Σ exp(lse_i − lse)·out_i, with lse the log-sum-exp of all
    (FlashDecoding); `lse` is finite."""
    weights = jax.nn.softmax(lse, axis=0)
    return jnp.sum(weights * out, axis=0)
