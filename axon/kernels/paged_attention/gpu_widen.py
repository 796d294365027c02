"""Tiles of a quantised cache as `wgmma` multiplies them: exactly, in bfloat16, in shared memory."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.warpgroups import ROWS

NARROW = plgpu.Layout.WGMMA_UPCAST_2X
"""Of numbers of 8 bits, four of which lie together in a register."""


def widen(tile: Any, wide: Any) -> Any:
    """`wide`, with the numbers of `tile[keys head_dim]`, both in shared memory."""
    for row in range(0, tile.shape[0], ROWS):
        rows = pl.ds(row, ROWS)
        wide[rows, ...] = _widened(plgpu.load(tile.at[rows], layout=NARROW))
    plgpu.commit_smem()
    return wide


def _widened(x: Array) -> Array:
    """Exactly; of float8_e4m3fn by way of float16, the conversion that Hopper has."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.float16).astype(jnp.float32)
    return x.astype(jnp.bfloat16)
