"""The experts of known models, forward and backward, for the chips to compile; with what they cost by formula."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.kernels.cost import Cost
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.grouped_matmul.tiling import Problem, gradient_bytes, gradient_tiles, product_bytes, product_tiles
from axon.kernels.grouped_matmul.tpu import grouped_matmul_tpu
from scripts.bench.case import Case, Part

MODELS = {"Mixtral 8x7B": (8192, 4096, 14336, 8), "DeepSeek-V2-Lite": (8192, 2048, 1408, 64)}
"""Name → rows, embed, out and groups."""


def cases() -> list[Case]:
    """Each is one forward and both gradients; of weights in 8 bits, which are not trained, a forward."""
    return [
        *(_case(name, *sizes, jnp.bfloat16) for name, sizes in MODELS.items()),
        *(_eight_bits("DeepSeek-V2-Lite", dtype) for dtype in EIGHT_BITS),
        _case("float32, rows that no tile divides", 1000, 512, 384, 5, jnp.float32),
    ]


def _case(name: str, rows: int, embed: int, out: int, groups: int, dtype: Any) -> Case:
    shapes = ((rows, embed), (groups, embed, out), (rows, out))
    x, w, dy = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    cost = cost_of(rows, embed, out, groups, jnp.dtype(dtype).itemsize)
    return Case("grouped_matmul", name, _forward_and_backward, (x, w, sizes, dy), cost)


def _eight_bits(name: str, dtype: Any) -> Case:
    rows, embed, out, groups = MODELS[name]
    x, w = jax.ShapeDtypeStruct((rows, embed), jnp.bfloat16), jax.ShapeDtypeStruct((groups, embed, out), dtype)
    problem = Problem(rows, embed, out, groups, 2, 2, 1)
    cost = Cost(problem.flops, product_bytes(problem, product_tiles(problem)))
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    return Case("grouped_matmul", f"{name}, {jnp.dtype(dtype).name} weights", grouped_matmul_tpu, (x, w, sizes), cost)


def cost_of(rows: int, embed: int, out: int, groups: int, itemsize: int) -> Cost:
    """Three products of `rows · embed · out`; the bytes are at most what the kernels' tiles move."""
    forward = Problem(rows, embed, out, groups, itemsize, itemsize)
    backward = Problem(rows, out, embed, groups, itemsize, itemsize)
    moved = sum(product_bytes(problem, product_tiles(problem)) for problem in (forward, backward))
    return Cost(3 * forward.flops, moved + gradient_bytes(forward, gradient_tiles(forward)))


def _forward_and_backward(x: Array, w: Array, sizes: Array, dy: Array) -> tuple[Array, Array, Array]:
    y, backward = jax.vjp(lambda x, w: grouped_matmul_tpu(x, w, sizes), x, w)
    return y, *backward(dy)


def parts() -> list[Part]:
    """The product and both gradients, of narrow experts: wide ones compile in minutes."""
    shapes = ((2048, 512), (8, 512, 512), (2048, 512))
    x, w, dy = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    operands = (x, w, jax.ShapeDtypeStruct((8,), jnp.int32), dy)
    calls = {
        "product, tile": ("grouped_matmul", 128),
        "gradient of rows, tile": ("grouped_matmul_transposed", 128),
        "gradient of weights, tile": ("grouped_matmul_weight_gradient", 512),
    }
    return [
        Part("grouped_matmul", name, call, _forward_and_backward, operands, 2 * piece * 512 * 512)
        for name, (call, piece) in calls.items()
    ]
