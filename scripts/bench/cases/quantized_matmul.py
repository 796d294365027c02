"""Products of known models in 8 bits, for the chips to compile; with what they cost by formula."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.kernels.cost import Cost
from axon.kernels.quantized_matmul.quantize import Quantized
from axon.kernels.quantized_matmul.tiling import bytes_moved, tiles_of
from axon.kernels.quantized_matmul.tpu import quantized_matmul_tpu
from scripts.bench.case import Case, Part


def cases() -> list[Case]:
    """One forward product each, to bfloat16."""
    return [
        _case("int8 a tensor, Llama 3 8B up", 8192, 4096, 14336, jnp.int8, (1, 1), (1, 1)),
        _case("int8 a row and a column, Llama 3 8B down, 8 rows", 8, 14336, 4096, jnp.int8, (8, 1), (1, 4096)),
        _case("fp8 a row and a column, Llama 3 8B up", 8192, 4096, 14336, jnp.float8_e4m3fn, (8192, 1), (1, 14336)),
        _case("fp8 in blocks, DeepSeek-V3 up", 4096, 7168, 2048, jnp.float8_e4m3fn, (4096, 56), (56, 16)),
        _case("int8 in blocks, DeepSeek-V3 up", 4096, 7168, 2048, jnp.int8, (4096, 56), (56, 16)),
    ]


def _case(
    name: str, rows: int, inner: int, out: int, dtype: Any, x_scales: tuple[int, int], w_scales: tuple[int, int]
) -> Case:
    values = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, inner), (inner, out)))
    scales = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x_scales, w_scales))
    blocks = max(x_scales[1], w_scales[0])
    moved = bytes_moved(rows, inner, out, blocks, 2, tiles_of(rows, inner, out, blocks))
    return Case("quantized_matmul", name, _to_bfloat16, (*values, *scales), Cost(2 * rows * inner * out, moved))


def _to_bfloat16(x: Array, w: Array, x_scales: Array, w_scales: Array) -> Array:
    return quantized_matmul_tpu(Quantized(x, x_scales), Quantized(w, w_scales), jnp.bfloat16)


def parts() -> list[Part]:
    """A tile of 512 × 1,024 × 1,024, to bfloat16."""
    return [
        _part("int8 a tensor", jnp.int8, (1, 1), (1, 1)),
        _part("fp8 a tensor", jnp.float8_e4m3fn, (1, 1), (1, 1)),
        _part("fp8 in blocks of 128", jnp.float8_e4m3fn, (1024, 16), (16, 16)),
    ]


def _part(name: str, dtype: Any, x_scales: tuple[int, int], w_scales: tuple[int, int]) -> Part:
    values = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1024, 2048), (2048, 2048)))
    scales = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x_scales, w_scales))
    return Part("quantized_matmul", f"{name}, tile", "quantized_matmul", _to_bfloat16, (*values, *scales))
