"""The quantised product in plain XLA: 8-bit products summed wide, and scaled after; where scales change along the
contracted dimension, one of its blocks at a time."""

from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.quantized_matmul.quantize import MOST_PRODUCTS, Quantized, broadcast_scales


def quantized_matmul_xla(x: Quantized, w: Quantized, dtype: Any) -> Array:
    """See `axon.kernels.quantized_matmul.quantized_matmul`."""
    x_scales, w_scales = broadcast_scales(x, w)
    blocks = x_scales.shape[1]
    size = x.values.shape[1] // blocks
    if blocks == 1:
        return (_dot(x.values, w.values) * x_scales * w_scales).astype(dtype)

    def block(total, i):
        left = lax.dynamic_slice_in_dim(x.values, i * size, size, axis=1)
        right = lax.dynamic_slice_in_dim(w.values, i * size, size)
        scaled = _dot(left, right) * lax.dynamic_slice_in_dim(x_scales, i, 1, axis=1) * w_scales[i]
        return total + scaled, None

    zeros = jnp.zeros((x.values.shape[0], w.values.shape[1]), jnp.float32)
    return lax.scan(block, zeros, jnp.arange(blocks))[0].astype(dtype)


def _dot(left: Array, right: Array) -> Array:
    """`rows inner` · `inner out`, float32: of int8 summed in int32, no more products at once than that has room for."""
    if left.dtype != jnp.int8:
        return _product(left, right, jnp.float32)
    pieces = [slice(at, at + MOST_PRODUCTS) for at in range(0, max(1, left.shape[1]), MOST_PRODUCTS)]
    return reduce(jnp.add, [_product(left[:, piece], right[piece], jnp.int32) for piece in pieces])


def _product(left: Array, right: Array, wide: Any) -> Array:
    """Summed in `wide`, the result float32."""
    product = lax.dot_general(left, right, (((1,), (0,)), ((), ())), preferred_element_type=wide)
    return product.astype(jnp.float32)
