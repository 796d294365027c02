"""Our Hopper kernels of grouped matmul on a GPU: how far they are from the formula, then TFLOP/s.

Beside them those of `jax.lax.ragged_dot`, and of one dense product of as many FLOPs, about the most that there can be.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon import axes
from axon.kernels.grouped_matmul import grouped_matmul, grouped_matmul_reference
from axon.layout import Layout, Placement
from scripts.bench.attention import TOLERANCE, attempt, attention_lines
from scripts.bench.cases.grouped_matmul import MODELS
from scripts.bench.timing import alternate, progress

OURS = "mosaic"

RIVALS: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    OURS: grouped_matmul,
    "ragged_dot": lax.ragged_dot,
    "dense": lambda x, w, sizes: x @ w,
}
"""Name → the product of rows, weights and sizes; one weight for all rows, if dense."""


class Problem(NamedTuple):
    """`rows embed` by `groups embed out`; the last `empty` rows are of no group, and hold NaN."""

    rows: int
    embed: int
    out: int
    groups: int
    dtype: str = "bfloat16"
    empty: int = 0

    def __str__(self) -> str:
        rest = f", {self.empty} of no group" if self.empty else ""
        return f"{self.rows} rows{rest}, {self.embed} × {self.out}, {self.groups} groups, {self.dtype}"


PROBLEMS = (
    Problem(1000, 256, 384, 5, empty=77),
    Problem(1000, 256, 384, 5, "float16", empty=77),
    Problem(96, 128, 1024, 64),
    Problem(4096, 2048, 1408, 16, empty=500),
    Problem(4096, 1024, 2048, 8),
)


def check(
    device: Any,
    problems: Sequence[Problem] = PROBLEMS,
    models: Mapping[str, tuple[int, int, int, int]] = MODELS,
    rounds: int = 10,
) -> dict[str, Any]:
    """Our errors; and of each model and implementation the TFLOP/s forward, and with both gradients, or why not."""
    errors = {str(one): attempt(lambda one=one: error(one, device)) for one in problems}
    speeds = {
        model: {
            name: attempt(lambda model=model, name=name: _tflops(Problem(*models[model]), device, name, rounds))
            for name in RIVALS
        }
        for model in models
    }
    return {"errors": errors, "speeds": speeds}


def error(problem: Problem, device: Any, kernel: str = OURS, seed: int = 0) -> dict[str, Any]:
    """How far product and gradients are from the formula's in float32 at most, in the Frobenius norm.

    They are within if that is near enough, and if a second run gives the same bits.
    """
    progress(f"grouped matmul by {kernel}: {problem}")
    x, w, sizes, dy = jax.device_put(drawn(problem, seed), device)
    with _scope(device, kernel) as scope, jax.default_matmul_precision("highest"):
        ours = jax.jit(partial(_both, grouped_matmul))
        first, second = (jax.device_get(ours(x, w, sizes, dy)) for _ in range(2))
        wide = (one.astype(jnp.float32) for one in (x, w, dy))
        exact = jax.device_get(jax.jit(lambda x, w, dy: _both(grouped_matmul_reference, x, w, sizes, dy))(*wide))
    off = {name: _relative(first[name], exact[name]) for name in exact}
    worst = max(off, key=lambda name: off[name])
    same = all(np.array_equal(first[name], second[name]) for name in exact)
    within = off[worst] <= TOLERANCE and same
    return {"chosen": scope.choices["grouped_matmul"], "error": off[worst], "of": worst, "within": within, "same": same}


def table(found: Mapping[str, Any]) -> str:
    """The findings of `check`, as text."""
    lines = [*attention_lines("our Hopper grouped matmul, against its formula", found["errors"]), ""]
    lines += [f"{name}: another run has other bits" for name, one in found["errors"].items() if not one.get("same", 1)]
    lines.append(f"{'TFLOP/s, bfloat16':80}{'forward':>10}{'and backward':>14}")
    for model, each in found["speeds"].items():
        lines += [f"{f'{model}, {by}':80}{_text(one)}" for by, one in each.items()]
    return "\n".join(lines)


def _text(one: Mapping[str, Any]) -> str:
    return one.get("unavailable") or f"{one['forward']:10.0f}{one['both']:14.0f}"


def drawn(problem: Problem, seed: int) -> tuple[np.ndarray, ...]:
    """Rows, weights, uneven sizes with one of zero, and the cotangent."""
    rng, (rows, embed, out, groups, dtype, empty) = np.random.default_rng(seed), problem
    shares = rng.dirichlet(np.full(groups - 1, 4.0))
    sizes = np.insert(rng.multinomial(rows - empty, shares), rng.integers(groups), 0).astype(np.int32)
    shapes = (rows, embed), (groups, embed, out), (rows, out)
    x, w, dy = (rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for shape in shapes)
    x[rows - empty :] = dy[rows - empty :] = np.nan
    return x, w, sizes, dy


def _tflops(problem: Problem, device: Any, name: str, rounds: int) -> dict[str, Any]:
    progress(f"speed of grouped matmul by {name}: {problem}")
    x, w, sizes, dy = drawn(problem, 0)
    operands = jax.device_put((x, w[0] if name == "dense" else w, sizes, dy), device)
    product = RIVALS[name]
    with _scope(device, OURS):
        runs = {"forward": lambda x, w, sizes, dy: product(x, w, sizes), "both": partial(_both, product)}
        compiled = {part: jax.jit(run).lower(*operands).compile() for part, run in runs.items()}
    seconds = alternate({n: lambda f=f: jax.block_until_ready(f(*operands)) for n, f in compiled.items()}, rounds)
    flops = 2 * problem.rows * problem.embed * problem.out
    done = {"forward": flops, "both": 3 * flops}
    return {part: done[part] / float(np.median(seconds[part])) / 1e12 for part in runs}


def _both(product: Callable[..., Array], x: Array, w: Array, sizes: Array, dy: Array) -> dict[str, Array]:
    y, backward = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    dx, dw = backward(dy)
    return {"y": y, "dx": dx, "dw": dw}


def _scope(device: Any, kernel: str) -> Any:
    placement = Placement.of(Layout(mesh={"data": 1}), [device])
    return axes.activate(axes.Scope(placement, execution=axes.Execution(kernels={"grouped_matmul": kernel})))


def _relative(ours: Any, exact: Any) -> float:
    ours, exact = (np.asarray(x, np.float64) for x in (ours, exact))
    off = float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))
    return off if np.isfinite(off) else float("inf")
