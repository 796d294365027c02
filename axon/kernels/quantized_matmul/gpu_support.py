"""Which quantised products the Hopper kernel supports; known without importing Pallas."""

from typing import Any

import jax.numpy as jnp

from axon.kernels import hopper
from axon.kernels.quantized_matmul.quantize import MOST_PRODUCTS, KMajor, Quantized

STEP = 128
"""Of k in one step: what a row of shared memory swizzled by 128 bytes holds, and DeepSeek-V3's blocks."""

PIECE = 128
"""Columns whose product in one step is one `wgmma`, and is added to their sums before the next one's begins."""

FEW = 64
"""Rows below which half of a tile at least is padding; the product is then as fast as w can be read."""


RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)


def unsupported(x: Quantized, w: Quantized | KMajor, dtype: Any, chip: str) -> str | None:
    """Why the kernel cannot do this product, to `dtype`, on a chip; None if it can."""
    if (reason := hopper.unsupported(chip)) is not None:
        return reason
    if not isinstance(w, KMajor):
        return "w is stored `k out`, and 8-bit tensor cores read both operands along k: store k_major(w)"
    if jnp.dtype(dtype) not in RESULTS:
        return f"its results are bfloat16, float16 or float32, not {jnp.dtype(dtype)}"
    (rows, inner), (out, _) = x.values.shape, w.values.shape
    if rows < FEW:
        return f"{rows} rows would leave most of a tile empty"
    if inner % STEP or out % PIECE:
        return f"k and out are multiples of {STEP}, not {inner} and {out}"
    blocks = max(x.scales.shape[1], w.scales.shape[1])
    if inner // blocks % STEP:
        return f"scales along k are of blocks that are multiples of {STEP}, not {inner // blocks}"
    if w.scales.shape[1] > 1 and out // w.scales.shape[0] % PIECE:
        return f"w's blocks along k are multiples of {PIECE} along out, not {out // w.scales.shape[0]}"
    if x.values.dtype == jnp.int8 and blocks == 1 and inner > MOST_PRODUCTS:
        return f"a sum of {inner} products of int8 does not fit int32"
    return None
