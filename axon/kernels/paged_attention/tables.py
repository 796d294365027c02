"""Tables that a step looks up of its ragged batch: made once, for it is the same in every layer."""

from dataclasses import dataclass, replace

import jax
from jax import Array

from axon.kernels.paged_attention.blocks import Blocks
from axon.kernels.paged_attention.groups import Groups
from axon.kernels.paged_attention.ragged import Places


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
    groups: Groups | None = None
    pages: Groups | None = None

    def moved(self, by: Array | int) -> "KernelTables":
        """For pages whose numbers are larger, by so many."""
        groups, pages = (None if g is None else replace(g, pages=g.pages + by) for g in (self.groups, self.pages))
        return replace(self, groups=groups, pages=pages)
