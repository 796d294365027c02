"""The experts of known models, forward and backward, as the Hopper kernels are compiled for an H200."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.kernels.cost import Cost
from axon.kernels.grouped_matmul.gpu import product, weight_gradient
from scripts.bench.case import Case
from scripts.bench.cases.grouped_matmul import MODELS

CONFIGURATIONS = (
    ("Mixtral 8x7B", "bfloat16"),
    ("DeepSeek-V2-Lite", "bfloat16"),
    ("DeepSeek-V2-Lite", "float16"),
)

GRADIENTS = {"bfloat16": jnp.float32, "float16": jnp.float16}
"""Dtype of the operands → that of the weights' gradient: as it is reduced, or as it is."""


def gpu_cases() -> list[Case]:
    """Each is one forward and both gradients."""
    return [_case(name, *MODELS[name], dtype) for name, dtype in CONFIGURATIONS]


def _case(name: str, rows: int, embed: int, out: int, groups: int, dtype: str) -> Case:
    accumulate: Any = GRADIENTS[dtype]

    def step(x: Array, w: Array, sizes: Array, dy: Array) -> tuple[Array, Array, Array]:
        """The product and both gradients."""
        y, dx = product(x, w, sizes, transposed=False), product(dy, w, sizes, transposed=True)
        return y, dx, weight_gradient(x, dy, sizes, dtype=accumulate)

    shapes = (rows, embed), (groups, embed, out), (rows, out)
    x, w, dy = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    once = (x.size + w.size + dy.size) * x.dtype.itemsize
    moved = 3 * once + w.size * (jnp.dtype(accumulate).itemsize - w.dtype.itemsize)
    operands = (x, w, jax.ShapeDtypeStruct((groups,), jnp.int32), dy)
    return Case("grouped_matmul", f"hopper, {name}, {dtype}", step, operands, Cost(6 * rows * embed * out, moved))
