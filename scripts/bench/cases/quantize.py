"""Operands of products of Llama 3 8B, rounded to 8 bits for the chips to compile; with what that costs by formula."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from axon.kernels.quantize import quantize_tpu
from axon.kernels.quantize.tpu import BLOCK, OPERATIONS, cost
from axon.precision.formats import E4M3, Format
from scripts.bench.case import Case, Part

TOKEN, COLUMN = (2,), (1,)
"""The axes of `batch seq mlp` along which a token's scale is shared, and that of a column of a sequence."""


def cases() -> list[Case]:
    """Two sequences of 8,192 tokens in bfloat16."""
    return [
        _case("int8 a token, Llama 3 8B mlp", "int8", TOKEN),
        _case("int8 a column of a sequence, Llama 3 8B mlp", "int8", COLUMN),
        _case("fp8 a token, Llama 3 8B mlp", E4M3, TOKEN),
    ]


def parts() -> list[Part]:
    """A block of 1,048,576 numbers in bfloat16."""
    return [
        _part("fp8 a token", E4M3, TOKEN),
        _part("int8 a token", "int8", TOKEN),
        _part("int8 a column", "int8", COLUMN),
    ]


def _case(name: str, dtype: Any, shared: tuple[int, ...]) -> Case:
    operand = _operand(14336)
    num_scales = math.prod(size for i, size in enumerate(operand.shape) if i not in shared)
    return Case("quantize", name, _function(dtype, shared), (operand,), cost(operand.shape, 2, num_scales))


def _part(name: str, dtype: Any, shared: tuple[int, ...]) -> Part:
    return Part(
        "quantize", f"{name}, block", "quantize", _function(dtype, shared), (_operand(4096),), OPERATIONS * BLOCK
    )


def _operand(width: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2, 8192, width), jnp.bfloat16)


def _function(dtype: Any, shared: tuple[int, ...]) -> Any:
    return lambda x: quantize_tpu(x, shared, Format(dtype, "row"))
