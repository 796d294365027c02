"""Grouped matmul on Hopper GPUs, by two kernels of our own in Pallas Mosaic GPU: a product and the weights' gradient.

The product does the forward and, with the weights transposed, dx.
"""

from functools import partial
from typing import Any

from jax import Array

from axon.kernels.grouped_matmul.differentiable import differentiable
from axon.kernels.grouped_matmul.gpu_gradient import weight_gradient
from axon.kernels.grouped_matmul.gpu_product import product


def grouped_matmul_gpu(x: Array, w: Array, sizes: Array, *, interpret: Any = False, blocks: int | None = None) -> Array:
    """See `axon.kernels.grouped_matmul.grouped_matmul`."""
    how = {"interpret": interpret, "blocks": blocks}
    return differentiable(partial(product, **how), partial(weight_gradient, **how))(x, w, sizes)
