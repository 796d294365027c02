"""An array before it exists: everything that persists, and every batch, is declared as one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from axon.axes.patterns import Names


@dataclass(frozen=True)
class ArraySpec:
    """An array before it exists.

    Args:
        axes, shape: the name and the size of each dimension. dtype: of its elements.
        kind: whose rows of the layout's table say where it lives: "activations", "params", "grads" or "optimizer".
    """

    axes: Names
    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    kind: str = "activations"

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * jnp.dtype(self.dtype).itemsize


Specs = Mapping[str, ArraySpec]
"""Name or path → array."""
