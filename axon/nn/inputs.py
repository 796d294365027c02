"""What a language model is given for each row of tokens."""

from dataclasses import dataclass, replace

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """One batch, or a part of it.

    Args:
        tokens: ids, `batch seq` int32. positions: place within the document, `batch seq` int32.
        documents: which document of the row, `batch seq` int32; None where rows hold one each.
        start: index of the first token in the memory of keys and values; None without a memory.
        key, rows: the key from which dropout follows, and each row's place in the global batch, `batch` int32; None
            where nothing is dropped.
    """

    tokens: Array
    positions: Array
    documents: Array | None = None
    start: Array | None = None
    key: Array | None = None
    rows: Array | None = None

    def in_layer(self, layer: Array | int) -> "Inputs":
        """The same, with a key of the layer's own, so that no two layers drop the same elements."""
        return self if self.key is None else replace(self, key=jax.random.fold_in(self.key, layer))
