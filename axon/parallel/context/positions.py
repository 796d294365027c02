"""Which positions of a sequence a device has, where they are stored in an order of their own."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Positions:
    """The positions of each device's part of a sequence.

    Args:
        order: puts a device's part in the order of its positions: the same permutation on every device.
        starts: of the sorted parts, `devices runs`: the first position of each run without a gap.
        length: of each run.
    """

    order: np.ndarray
    starts: np.ndarray
    length: int

    @classmethod
    def of(cls, stored: np.ndarray, size: int) -> "Positions":
        """Of a sequence whose positions are stored in this order, split over `size` devices.

        Stored zig-zag for a ring (see `axon.layout.zigzag`), it may be split over fewer devices, or over more: for an
        exchange, or in a layer whose ring is shorter.
        """
        parts = stored.reshape(size, -1)
        order = np.argsort(parts[0])
        parts = parts[:, order]
        gaps = np.flatnonzero((np.diff(parts, axis=1) != 1).any(axis=0)) + 1
        length = math.gcd(parts.shape[1], *gaps.tolist())
        return cls(order, parts[:, ::length], length)


def permuted(x: Any, order: np.ndarray) -> Any:
    """`batch seq …` in this order; None stays."""
    return x if x is None or np.array_equal(order, np.arange(len(order))) else jnp.take(x, order, axis=1)
