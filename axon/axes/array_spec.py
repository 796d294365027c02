"""An array before it exists: everything that persists, and every batch, is declared as one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from axon.axes.patterns import Names


@dataclass(frozen=True)
class ArraySpec:
    """An array before it exists.

    Args:
        axes, shape: the name and the size of each dimension. dtype: of its elements.
        kind: whose rows of the layout's table say where it lives: "activations", "params", "grads" or "optimizer".
        unpadded: its shape without the identity layers that `Layout.pad_layers` adds, if it has any: what is beyond it
            counts for nothing, and no checkpoint restores it.
    """

    axes: Names
    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    kind: str = "activations"
    unpadded: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        return self.shape if self.unpadded is None else self.unpadded

    @property
    def size(self) -> int:
        """How many elements, without padding."""
        return math.prod(self.logical_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, padding included."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


Specs = Mapping[str, ArraySpec]
"""Name or path → array."""
