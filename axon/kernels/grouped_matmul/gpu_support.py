"""Which grouped products the Hopper kernels support, and in which tiles; known without importing Pallas."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.kernels import hopper

LANES = 128
"""What a tile of columns is a multiple of."""


class Sizes(NamedTuple):
    """Columns of a block's tile of the result, and how many tiles of both operands shared memory holds."""

    columns: int
    stages: int


def sizes_for(columns: int) -> Sizes:
    """The widest tile that divides so many columns, and as many in flight as fit beside the result's."""
    return Sizes(256, 4) if columns % 256 == 0 else Sizes(LANES, 6)


def unsupported(x: Array, w: Any, chip: str) -> str | None:
    """Why the kernels cannot do this product on a chip; None if they can."""
    if (reason := hopper.unsupported(chip)) is not None:
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its operands are bfloat16 or float16, not {x.dtype}"
    if w.dtype != x.dtype:
        return f"its weight has the dtype of its rows, not {w.dtype}"
    if not x.shape[0]:
        return "there are no rows"
    if w.shape[1] % LANES or w.shape[2] % LANES:
        return f"embed and out are multiples of {LANES}, not {w.shape[1]} and {w.shape[2]}"
    return None
