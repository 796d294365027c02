"""The quantised product by its formula: both operands in float32, and their product."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from axon.kernels.quantized_matmul.quantize import Quantized, dequantize


def quantized_matmul_reference(x: Quantized, w: Quantized, dtype: Any) -> Array:
    """See `axon.kernels.quantized_matmul.quantized_matmul`."""
    return jnp.matmul(dequantize(x), dequantize(w), precision=lax.Precision.HIGHEST).astype(dtype)
