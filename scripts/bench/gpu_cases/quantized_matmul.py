"""The configurations of the Hopper kernel, as they are compiled for an H200."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.kernels.quantized_matmul.gpu import cost, quantized_matmul_gpu
from axon.kernels.quantized_matmul.quantize import KMajor, Quantized
from scripts.bench.case import Case

FP8 = jnp.float8_e4m3fn


def gpu_cases() -> list[Case]:
    """Each kind of scales with fp8 and int8, a narrow tile, and each size of result."""
    return [
        *(_case("a row and a column, Llama 3 8B up", dtype, 8192, 4096, 14336, 1, 1) for dtype in (FP8, jnp.int8)),
        *(_case("in blocks, DeepSeek-V3 up", dtype, 4096, 7168, 2048, 56, 56) for dtype in (FP8, jnp.int8)),
        _case("blocks of x alone, Llama 3 8B up", FP8, 8192, 4096, 14336, 32, 1),
        _case("in blocks, a tile of 128 columns", FP8, 4096, 7168, 2176, 56, 56),
        _case("in blocks, DeepSeek-V3 up", FP8, 4096, 7168, 2048, 56, 56, jnp.float32),
    ]


def _case(
    name: str, values: Any, rows: int, inner: int, out: int, x_blocks: int, w_blocks: int, dtype: Any = jnp.bfloat16
) -> Case:
    """With a scale for each row of x, and of w for each column, or for each 128 where there are blocks along k."""
    w_scales = (out // 128, w_blocks) if w_blocks > 1 else (out, 1)
    operands = (
        jax.ShapeDtypeStruct((rows, inner), values),
        jax.ShapeDtypeStruct((out, inner), values),
        jax.ShapeDtypeStruct((rows, x_blocks), jnp.float32),
        jax.ShapeDtypeStruct(w_scales, jnp.float32),
    )

    def product(x: Array, w: Array, x_scales: Array, w_scales: Array) -> Array:
        return quantized_matmul_gpu(Quantized(x, x_scales), KMajor(w, w_scales), dtype)

    short = "fp8" if values == FP8 else "int8"
    title = f"hopper, {short} {name}, {jnp.dtype(dtype).name}"
    return Case("quantized_matmul", title, product, operands, cost(rows, inner, out, dtype))
