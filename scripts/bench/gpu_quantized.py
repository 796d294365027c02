"""Our Hopper kernel of the quantised product on a GPU: how far it is from the formula, then TFLOP/s.

Beside them those of XLA's own form, and of a product of bfloat16.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon import axes
from axon.kernels.quantized_matmul import (
    BLOCK,
    COLUMN,
    ROW,
    ROW_BLOCK,
    TENSOR,
    Granularity,
    KMajor,
    Quantized,
    k_major,
    quantize,
    quantized_matmul,
    quantized_matmul_reference,
)
from axon.layout import Layout, Placement
from scripts.bench.attention import attempt
from scripts.bench.timing import alternate, progress

OURS, RIVAL, BFLOAT16 = "mosaic", "xla", "bfloat16"

TOLERANCE = 2e-3
"""Largest relative error, in the Frobenius norm: the result is rounded to bfloat16, to 2^-9."""


class Problem(NamedTuple):
    """A product by name, `rows k` by `k out`, and the scales of both."""

    name: str
    pair: tuple[Granularity, Granularity]
    dtype: str = "float8_e4m3fn"
    shape: tuple[int, int, int] = (512, 1024, 768)

    def __str__(self) -> str:
        return f"{self.dtype} {self.name}, {self.shape[0]} × {self.shape[1]} by {self.shape[2]}"


LARGE = (8192, 4096, 14336)
"""Llama 3 8B's up projection of 8,192 tokens."""

PAIRS = {
    "a tensor": (TENSOR, TENSOR),
    "a row and a column": (ROW, COLUMN),
    "in blocks": (ROW_BLOCK, BLOCK),
    "blocks of x alone": (ROW_BLOCK, COLUMN),
}

SPEEDS = tuple(
    Problem(name, pair, dtype, LARGE)
    for dtype in ("float8_e4m3fn", "int8")
    for name, pair in PAIRS.items()
    if name != "blocks of x alone"
)


def problems() -> list[Problem]:
    """Every kind of scales with both dtypes; rows that no tile divides, a narrow tile, and long blocks."""
    found = [Problem(name, pair, dtype) for dtype in ("float8_e4m3fn", "int8") for name, pair in PAIRS.items()]
    long = Granularity(1, 256), Granularity(256, 256)
    return [
        *found,
        Problem("in blocks", PAIRS["in blocks"], shape=(500, 1024, 640)),
        Problem("blocks of 256", long),
        Problem("in blocks", PAIRS["in blocks"], shape=(4096, 7168, 2048)),
    ]


def check(device: Any) -> dict[str, Any]:
    """Our errors; and the speeds of ours, of XLA's, and of bfloat16's."""
    return {
        "errors": {str(one): attempt(lambda one=one: error(one, device)) for one in problems()},
        "speeds": speeds(device),
    }


def error(problem: Problem, device: Any, kernel: str = OURS, seed: int = 0) -> dict[str, Any]:
    """How far an implementation is from the formula in float32, in the Frobenius norm, and if that is near enough."""
    progress(f"quantised product by {kernel}: {problem}")
    x, w = drawn(problem, device, seed)
    with _scope(device, kernel) as scope:
        ours = jax.jit(lambda x, w: quantized_matmul(x, w))(x, w)
    exact = jax.jit(lambda x, w: quantized_matmul_reference(x, w.transposed, jnp.float32))(x, w)
    ours, exact = (np.asarray(each, np.float64) for each in (ours, exact))
    off = float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))
    return {"chosen": scope.choices["quantized_matmul"], "error": off, "within": off <= TOLERANCE}


def speeds(
    device: Any,
    found: Sequence[Problem] = SPEEDS,
    names: Sequence[str] = (OURS, RIVAL, BFLOAT16),
    rounds: int = 10,
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each problem and implementation: TFLOP/s, or why it fails."""
    return {
        str(one): {name: attempt(lambda one=one, name=name: _tflops(one, device, name, rounds)) for name in names}
        for one in found
    }


def table(found: Mapping[str, Any]) -> str:
    """The findings of `check`, as text."""
    lines = [f"{'our Hopper quantised product, against its formula':80}{'error':>10}{'allowed':>10}"]
    for name, one in found["errors"].items():
        if "unavailable" in one:
            lines.append(f"{name:80}  {one['unavailable']}")
        else:
            lines.append(f"{name:80}{one['error']:10.1e}{TOLERANCE:10.1e}  {'ok' if one['within'] else 'TOO FAR'}")
    lines += ["", f"{'TFLOP/s':80}"]
    for name, each in found["speeds"].items():
        lines += [f"{f'{name}, {by}':80}{_text(one)}" for by, one in each.items()]
    return "\n".join(lines)


def _text(one: Mapping[str, Any]) -> str:
    return one.get("unavailable") or f"{one['tflops']:10.0f}"


def drawn(problem: Problem, device: Any, seed: int) -> tuple[Quantized, KMajor]:
    """x, and w as our kernel reads it, quantised from normal numbers."""
    rows, inner, out = problem.shape
    keys = jax.random.split(jax.device_put(jax.random.key(seed), device))

    def make(keys: Array) -> tuple[Quantized, KMajor]:
        x, w = (jax.random.normal(key, shape) for key, shape in zip(keys, ((rows, inner), (inner, out)), strict=True))
        dtype, (of_x, of_w) = jnp.dtype(problem.dtype), problem.pair
        return quantize(x, dtype, of_x), k_major(quantize(w, dtype, of_w))

    return jax.jit(make)(keys)


def _scope(device: Any, kernel: str) -> Any:
    placement = Placement.of(Layout(mesh={"data": 1}), [device])
    return axes.activate(axes.Scope(placement, execution=axes.Execution(kernels={"quantized_matmul": kernel})))


def _tflops(problem: Problem, device: Any, name: str, rounds: int) -> dict[str, Any]:
    progress(f"speed of the quantised product by {name}: {problem}")
    x, w = drawn(problem, device, 0)
    if name == BFLOAT16:
        operands = x.values.astype(jnp.bfloat16), w.values.astype(jnp.bfloat16).T
        compiled = jax.jit(jnp.matmul).lower(*operands).compile()
    else:
        operands = x, w
        with _scope(device, name):
            compiled = jax.jit(lambda x, w: quantized_matmul(x, w)).lower(x, w).compile()
    seconds = alternate({name: lambda: jax.block_until_ready(compiled(*operands))}, rounds)[name]
    rows, inner, out = problem.shape
    return {"tflops": 2 * rows * inner * out / float(np.median(seconds)) / 1e12}
