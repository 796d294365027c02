"""Where a step's new keys and values go: aligned groups of slots of a page, each of which is written as a whole;
and the tables that a step looks up of its ragged batch, which are made once, for all layers."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from axon.kernels.paged_attention.blocks import Blocks
from axon.kernels.paged_attention.ragged import AttentionInputs, Places


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotGroups:
    """Aligned groups of a page's slots that get something new: `[first, last)` of `size` slots; none if it is padding.

    Args:
        pages, parts: of each group, `groups`, the page, and which of its groups of `size` slots.
        rows: the new token of each slot, `groups size`.
    """

    pages: Array
    parts: Array
    first: Array
    last: Array
    rows: Array

    def padded(self, count: int) -> "SlotGroups":
        """With padding up to `count` groups."""
        more = count - self.rows.shape[0]
        return jax.tree.map(lambda a: jnp.pad(a, ((0, more), *(((0, 0),) * (a.ndim - 1)))), self)


def groups(inputs: AttentionInputs, tokens: int, size: int, page_size: int) -> SlotGroups:
    """Of n tokens from position s on: ⌊(s + n - 1) / size⌋ - ⌊s / size⌋ + 1 groups, no more than there are tokens."""
    lens = inputs.q_lens
    start = inputs.kv_lens - lens
    counts = jnp.where(lens > 0, (inputs.kv_lens - 1) // size - start // size + 1, 0)
    ends = jnp.cumsum(counts)
    room = min(tokens, tokens // size + 2 * min(tokens, inputs.sequences))
    index = jnp.arange(room, dtype=jnp.int32)
    real = index < ends[-1]
    owner = jnp.minimum(jnp.searchsorted(ends, index, side="right"), inputs.sequences - 1)
    position = (start[owner] // size + index - (ends - counts)[owner]) * size
    column = jnp.clip(position // page_size, 0, inputs.page_table.shape[1] - 1)
    return SlotGroups(
        pages=jnp.where(real, inputs.page_table[owner, column], 0),
        parts=jnp.where(real, position % page_size // size, 0),
        first=jnp.where(real, jnp.maximum(start[owner] - position, 0), 0),
        last=jnp.where(real, jnp.minimum(inputs.kv_lens[owner] - position, size), 0),
        rows=(inputs.cu_q_lens[owner] + position - start[owner])[:, None] + jnp.arange(size),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelTables:
    """Of one of the Pallas kernels, for queries and a cache of given shapes.

    Args:
        where: of each row, its sequence and position. plan: the blocks of queries.
        groups, pages: where new keys and values go, and their scales; of the TPU kernel.
    """

    where: Places
    plan: Blocks
    groups: SlotGroups | None = None
    pages: SlotGroups | None = None

    def moved(self, by: Array | int) -> "KernelTables":
        """For pages whose numbers are larger, by so many."""
        groups, pages = (None if g is None else replace(g, pages=g.pages + by) for g in (self.groups, self.pages))
        return replace(self, groups=groups, pages=pages)
