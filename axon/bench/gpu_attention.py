"""Our Hopper kernels of attention on a GPU: how far they are from the formula, then TFLOP/s beside cuDNN's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axon import axes
from axon.bench.timing import alternate, progress
from axon.errors import UserError
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    Mask,
    Prefix,
    SameDocument,
    Window,
    attention_and_lse,
    attention_reference,
)
from axon.kernels.attention.cost import backward_cost, forward_cost
from axon.layout import Layout, Placement

OURS, RIVAL = "mosaic", "cudnn"

TOLERANCE = 1e-2
"""Largest relative error of a result, in norm: bfloat16 rounds weights and results to 2^-9."""


class Problem(NamedTuple):
    """An attention of `batch seq heads kv_heads`, with widths of keys and of values."""

    mask: Mask
    widths: tuple[int, int] = (128, 128)
    dtype: str = "bfloat16"
    sizes: tuple[int, int, int, int] = (2, 1000, 8, 2)

    def __str__(self) -> str:
        (width, value), seq = self.widths, self.sizes[1]
        return f"{self.mask}, {seq} × {width}" + (f"/{value}" if value != width else "") + f", {self.dtype}"


WIDTHS = (64, 64), (128, 128), (192, 128), (256, 256)

RIGHT = (
    *(Problem(mask) for mask in (Everything(), Causal(), Causal() & Window(300), Prefix(200) & SameDocument())),
    *(Problem(Causal() & SameDocument(), widths) for widths in WIDTHS),
    Problem(Causal() & SameDocument(), dtype="float16"),
)
"""Lengths are no multiple of a tile."""

FAST = tuple(Problem(Causal(), widths, sizes=(2, 8192, 16, 4)) for widths in WIDTHS)


def check_ours(device: Any, problems: Sequence[Problem] = RIGHT, name: str = OURS) -> dict[str, dict[str, Any]]:
    """For each problem: the largest relative error of a result and if it is within; or why it does not run."""
    return {str(problem): _attempt(lambda problem=problem: _error(problem, device, name)) for problem in problems}


def speed_of_both(
    device: Any, problems: Sequence[Problem] = FAST, names: Sequence[str] = (OURS, RIVAL), rounds: int = 10
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each problem and implementation: TFLOP/s of the forward, and of forward and backward; or why it fails."""
    return {
        str(problem): {
            name: _attempt(lambda problem=problem, name=name: _tflops(problem, device, name, rounds)) for name in names
        }
        for problem in problems
    }


def table(errors: Mapping[str, Any], speeds: Mapping[str, Any]) -> str:
    """Both results as text."""
    lines = [f"{'our Hopper attention, against its formula':64}{'error':>10}{'allowed':>10}"]
    lines += [f"{name:64}{_error_text(one)}" for name, one in errors.items()]
    lines += ["", f"{'TFLOP/s':64}{'forward':>10}{'and backward':>14}"]
    each = [(f"{name}, {by}", one) for name, found in speeds.items() for by, one in found.items()]
    lines += [f"{name:64}{_speed_text(one)}" for name, one in each]
    return "\n".join(lines)


def _error_text(one: Mapping[str, Any]) -> str:
    if "unavailable" in one:
        return one["unavailable"]
    return f"{one['error']:10.1e}{TOLERANCE:10.1e}  {'ok' if one['within'] else 'TOO FAR'}"


def _speed_text(one: Mapping[str, Any]) -> str:
    return one.get("unavailable") or f"{one['forward']:10.0f}{one['both']:14.0f}"


def _attempt(fn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `fn` finds, or why an implementation that is requested by name does not run here, or fails to."""
    try:
        return fn()
    except (UserError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return {"unavailable": str(error).strip().splitlines()[0]}


def _error(problem: Problem, device: Any, name: str) -> dict[str, Any]:
    progress(f"attention by {name}: {problem}")
    operands = _drawn(problem, device)
    ours = _gradients(problem, attention_and_lse)
    with _requested(device, name):
        found = jax.device_get(jax.jit(ours)(*operands))
    wide = tuple(x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands)
    with jax.default_matmul_precision("highest"):
        exact = jax.device_get(jax.jit(_gradients(problem, attention_reference))(*wide))
    worst = max(_relative(*pair) for pair in zip(found, exact, strict=True))
    return {"error": worst, "within": worst <= TOLERANCE}


def _tflops(problem: Problem, device: Any, name: str, rounds: int) -> dict[str, Any]:
    progress(f"speed of attention by {name}: {problem}")
    (batch, seq, heads, kv_heads), (width, value) = problem.sizes, problem.widths
    q, *rest = operands = _drawn(problem, device)
    config, inputs = _config(problem), AttentionInputs((rest[-1], rest[-1]))
    with _requested(device, name):
        forward = jax.jit(lambda q, k, v, *_: attention_and_lse(q, k, v, config, inputs)[0]).lower(*operands).compile()
        both = jax.jit(_gradients(problem, attention_and_lse)).lower(*operands).compile()
    runs = {"forward": forward, "both": both}
    seconds = alternate({n: lambda f=f: jax.block_until_ready(f(*operands)) for n, f in runs.items()}, rounds)
    of_q = jax.ShapeDtypeStruct((batch, kv_heads, heads // kv_heads, seq, width), q.dtype)
    of_k, of_v = (jax.ShapeDtypeStruct((batch, kv_heads, seq, size), q.dtype) for size in (width, value))
    there, back = (cost(problem.mask, of_q, of_k, of_v).flops for cost in (forward_cost, backward_cost))
    flops = {"forward": there, "both": there + back}
    return {n: flops[n] / float(np.median(seconds[n])) / 1e12 for n in runs}


def _requested(device: Any, name: str) -> Any:
    placement = Placement.of(Layout(mesh={"data": 1}), [device])
    return axes.activate(axes.Scope(placement, kernels={"attention": name}))


def _config(problem: Problem) -> AttentionConfig:
    return AttentionConfig(problem.mask, problem.widths[0] ** -0.5)


def _drawn(problem: Problem, device: Any, seed: int = 0) -> tuple[Any, ...]:
    """Queries, keys, values, the cotangent of the output, and documents."""
    (batch, seq, heads, kv_heads), (width, value) = problem.sizes, problem.widths
    rng, dtype = np.random.default_rng(seed), jnp.dtype(problem.dtype)
    shapes = (heads, width), (kv_heads, width), (kv_heads, value), (heads, value)
    arrays = [rng.standard_normal((batch, seq, *shape), np.float32).astype(dtype) for shape in shapes]
    documents = np.sort(rng.integers(0, 4, (batch, seq)), axis=1).astype(np.int32)
    return tuple(jax.device_put([*arrays, documents], device))


def _gradients(problem: Problem, attend: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Output, log-sum-exp, and the gradients of queries, keys and values."""

    def run(q, k, v, dout, documents):
        inputs = AttentionInputs((documents, documents))
        out, backward, lse = jax.vjp(lambda *x: attend(*x, _config(problem), inputs), q, k, v, has_aux=True)
        return out, lse, *backward(dout.astype(out.dtype))

    return run


def _relative(actual: Any, exact: Any) -> float:
    actual, exact = (np.asarray(x, np.float64) for x in (actual, exact))
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))
