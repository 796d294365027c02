"""`axon bench kernels`: our kernels on this machine's CPU against plain JAX, and their costs by formula.

Times: both sides in one run, alternating, the median of several; what is claimed is the ratio. Memory: what XLA
allocates for intermediate values, as the compiled program says.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.kernels.attention import Causal, attention
from scripts.bench import Result, cross_entropy, paged, reference
from scripts.bench.timing import alternate, median_error


def run() -> Result:
    """Each kernel against its baseline."""
    return {
        "attention": attention_against_jax(),
        "paged": paged.measure_decode(),
        "cross_entropy": cross_entropy.measure(),
    }


def rows(result: Result) -> list[tuple[str, str]]:
    """The result as a table: (what, figure)."""
    one, loss = result["attention"], result["cross_entropy"]
    return [
        (f"attention, forward and backward, {one['shape']}", f"{one['ratio']:.2f} × jax.nn.dot_product_attention"),
        *((f"paged decode, {shape}", f"{one['ratio']:.2f} × the reference") for shape, one in result["paged"].items()),
        ("cross-entropy, memory for intermediate values", f"1/{1 / loss['memory_ratio']:.1f} of the naive form's"),
        ("cross-entropy, time", f"{loss['time_ratio']:.2f} of the naive form's"),
    ]


def attention_against_jax(rounds: int = 31) -> Result:
    """Causal training attention, forward and backward, at the shape of `axon bench train`."""
    model = reference.MODEL
    shape = (reference.BATCH, reference.SEQ, model.heads, model.embed // model.heads)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, shape, jnp.float32) for key in keys)

    def ours(q, k, v):
        return attention(q, k, v, Causal())

    def jaxs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    seconds = alternate({"ours": _step(ours, q, k, v, dout), "jax": _step(jaxs, q, k, v, dout)}, rounds)
    ratios = seconds["jax"] / seconds["ours"]
    return {
        "shape": f"{shape[0]} × {shape[1]} × {shape[2]} heads × {shape[3]}, float32",
        "ours_ms": 1e3 * float(np.median(seconds["ours"])),
        "jax_ms": 1e3 * float(np.median(seconds["jax"])),
        "ratio": float(np.median(ratios)),
        "error": median_error(ratios),
    }


def _step(function: Callable[..., Any], q: Array, k: Array, v: Array, dout: Array) -> Callable[[], Any]:
    def step(q, k, v, dout):
        out, backward = jax.vjp(function, q, k, v)
        return out, backward(dout)

    compiled = jax.jit(step)
    return lambda: jax.block_until_ready(compiled(q, k, v, dout))
