"""What attention over pages in plain XLA looks up of its batch: two kinds of blocks, those that see most keys first.

Where there are more rows than sequences, sequences with one query (which decode) have blocks of one query, and the
others (which prefill, or verify) have blocks of many: so a step with both computes no rows that do not exist.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from axon.kernels.paged_attention.blocks import Blocks, blocks
from axon.kernels.paged_attention.ragged import AttentionInputs, Places, places

QUERIES = 16
"""Queries a block, at most, of sequences with more than one."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class XlaTables:
    """Of a batch of `tokens` rows.

    Args:
        where: of each row, its sequence and position. kinds: its blocks, of each kind those that see most keys first.
        rows: int32 `tokens`: of each, its place among the rows of all blocks, one kind's after the other's.
    """

    where: Places
    kinds: tuple[Blocks, ...]
    rows: Array

    def moved(self, by: Array | int) -> "XlaTables":
        """For pages whose numbers are larger: nothing here says which they are."""
        return self


def tables_xla(tokens: int, inputs: AttentionInputs) -> XlaTables:
    """The tables of so many rows."""
    where = places(inputs, tokens)
    if tokens <= inputs.sequences:
        plan, rows = _longest_first(blocks(inputs, tokens, 1), where, inputs)
        return XlaTables(where, (plan,), rows)
    lens, sequences = inputs.q_lens, inputs.sequences
    one, one_rows = _longest_first(blocks(inputs, tokens, 1, jnp.where(lens == 1, lens, 0), sequences), where, inputs)
    many, rows = _longest_first(blocks(inputs, tokens, QUERIES, jnp.where(lens > 1, lens, 0)), where, inputs)
    rows = jnp.where(lens[where.sequences] == 1, one_rows, sequences + rows)
    return XlaTables(where, (one, many), rows)


def _longest_first(plan: Blocks, where: Places, inputs: AttentionInputs) -> tuple[Blocks, Array]:
    """The blocks in another order, and of each token its place among their rows; of one that has none, anything."""
    order = jnp.argsort(-plan.ends)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    inside = jnp.arange(len(where.real)) - inputs.cu_q_lens[where.sequences]
    block = plan.starts[where.sequences] + inside // plan.queries
    rows = places.at[block].get(mode="clip") * plan.queries + inside % plan.queries
    return plan.take(order), rows.astype(jnp.int32)
