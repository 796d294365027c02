"""Our Hopper kernels of attention on a GPU: how far they are from the formula, then TFLOP/s beside cuDNN's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axon import axes
from axon.kernels.attention import AttentionConfig, AttentionInputs, Causal, Mask, attention_and_lse
from axon.kernels.attention.cost import backward_cost, forward_cost
from axon.layout import Layout, Placement
from scripts.bench.attention import attempt, attention_lines, check_attention
from scripts.bench.timing import alternate, progress

OURS, RIVAL = "mosaic", "cudnn"


class Shape(NamedTuple):
    """An attention of `batch seq heads kv_heads`, with widths of keys and of values."""

    mask: Mask
    widths: tuple[int, int] = (128, 128)
    sizes: tuple[int, int, int, int] = (2, 8192, 16, 4)

    def __str__(self) -> str:
        (width, value), seq = self.widths, self.sizes[1]
        return f"{self.mask}, {seq} × {width}" + (f"/{value}" if value != width else "")


SHAPES = tuple(Shape(Causal(), widths) for widths in ((64, 64), (128, 128), (192, 128), (256, 256)))


def check(device: Any) -> dict[str, Any]:
    """Our errors, and both kernels' speeds."""
    return {"errors": check_attention(device, small=False, kernel=OURS), "speeds": speeds(device)}


def speeds(
    device: Any, shapes: Sequence[Shape] = SHAPES, names: Sequence[str] = (OURS, RIVAL), rounds: int = 10
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each shape and implementation: TFLOP/s of the forward, and of forward and backward; or why it fails."""
    return {
        str(shape): {
            name: attempt(lambda shape=shape, name=name: _tflops(shape, device, name, rounds)) for name in names
        }
        for shape in shapes
    }


def table(found: Mapping[str, Any]) -> str:
    """The findings of `check`, as text."""
    lines = [*attention_lines("our Hopper attention, against its formula", found["errors"]), ""]
    lines.append(f"{'TFLOP/s, bfloat16':80}{'forward':>10}{'and backward':>14}")
    for name, each in found["speeds"].items():
        lines += [f"{f'{name}, {by}':80}{_text(one)}" for by, one in each.items()]
    return "\n".join(lines)


def _text(one: Mapping[str, Any]) -> str:
    return one.get("unavailable") or f"{one['forward']:10.0f}{one['both']:14.0f}"


def _tflops(shape: Shape, device: Any, name: str, rounds: int) -> dict[str, Any]:
    progress(f"speed of attention by {name}: {shape}")
    (batch, seq, heads, kv_heads), (width, value) = shape.sizes, shape.widths
    operands = _drawn(shape, device)
    placement = Placement.of(Layout(mesh={"data": 1}), [device])
    with axes.activate(axes.Scope(placement, execution=axes.Execution(kernels={"attention": name}))):
        runs = {"forward": _forward(shape), "both": _both(shape)}
        compiled = {part: jax.jit(run).lower(*operands).compile() for part, run in runs.items()}
    seconds = alternate({n: lambda f=f: jax.block_until_ready(f(*operands)) for n, f in compiled.items()}, rounds)
    of_q = jax.ShapeDtypeStruct((batch, kv_heads, heads // kv_heads, seq, width), jnp.bfloat16)
    of_k, of_v = (jax.ShapeDtypeStruct((batch, kv_heads, seq, size), jnp.bfloat16) for size in (width, value))
    there, back = (cost(shape.mask, of_q, of_k, of_v).flops for cost in (forward_cost, backward_cost))
    flops = {"forward": there, "both": there + back}
    return {n: flops[n] / float(np.median(seconds[n])) / 1e12 for n in runs}


def _drawn(shape: Shape, device: Any) -> tuple[Any, ...]:
    """Queries, keys, values, and the cotangent of the output."""
    (batch, seq, heads, kv_heads), (width, value) = shape.sizes, shape.widths
    rng = np.random.default_rng(0)
    of_heads = (heads, width), (kv_heads, width), (kv_heads, value), (heads, value)
    arrays = [rng.standard_normal((batch, seq, *each), np.float32).astype(jnp.bfloat16) for each in of_heads]
    return tuple(jax.device_put(arrays, device))


def _forward(shape: Shape) -> Callable[..., Any]:
    config = AttentionConfig(shape.mask, shape.widths[0] ** -0.5)
    return lambda q, k, v, dout: attention_and_lse(q, k, v, config, AttentionInputs())[0]


def _both(shape: Shape) -> Callable[..., Any]:
    def run(q, k, v, dout):
        out, backward = jax.vjp(lambda *x: _forward(shape)(*x, dout), q, k, v)
        return out, *backward(dout)

    return run
