"""Grouped matmul on TPUs, by two Pallas kernels of our own: a product (forward and dx) and the weights' gradient.

Both walk over the visits of `visits.py`, whose arrays are prefetched into scalar memory so that they steer the copies.
MegaBlocks (Gale et al., arXiv:2211.15841) shows that no row need be dropped or padded for this.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from axon.kernels.grouped_matmul.differentiable import differentiable
from axon.kernels.grouped_matmul.tiling import LANES
from axon.kernels.grouped_matmul.tpu_gradient import weight_gradient
from axon.kernels.grouped_matmul.tpu_product import product

DTYPES = (jnp.bfloat16, jnp.float32)


def unfit(x: Array, w: Array) -> str | None:
    """Why the kernels cannot do this product; None if they can."""
    embed, out = w.shape[1:]
    if x.dtype not in DTYPES:
        return f"its operands are bfloat16 or float32, not {x.dtype}"
    if not x.shape[0]:
        return "there are no rows"
    if embed % LANES or out % LANES:
        return f"embed and out are multiples of {LANES}, not {embed} and {out}"
    return None


def grouped_matmul_tpu(x: Array, w: Array, sizes: Array, *, interpret: Any = False) -> Array:
    """See `axon.kernels.grouped_matmul.grouped_matmul`."""
    grouped = differentiable(partial(product, interpret=interpret), partial(weight_gradient, interpret=interpret))
    return grouped(x, w, sizes)
