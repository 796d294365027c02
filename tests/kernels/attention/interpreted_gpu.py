"""One case of the Hopper kernels in the interpreter, races detected. Prints, as JSON, how far each result is from the
reference's in float32, relative in norm. Run in a process of its own: a wait that nothing ends hangs it.
"""

import json
import os
import sys
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.attention import AttentionConfig, AttentionInputs, attention_reference
from axon.kernels.attention.gpu import attention_gpu
from axon.kernels.attention.mask import Causal, Everything, Prefix, SameDocument, Window

NAMES = ("out", "lse", "dq", "dk", "dv")

MASKS = {
    "unmasked": Everything(),
    "causal": Causal(),
    "documents": Causal() & SameDocument(),
    "window": Causal() & Window(70),
    "prefix": Prefix(100) & SameDocument() & Window(150),
}


def main(case: dict) -> dict:
    rng, dtype = np.random.default_rng(case["seed"]), jnp.dtype(case["dtype"])
    (queries, keys), (heads, kv_heads), (width, value) = case["lengths"], case["heads"], case["widths"]
    shapes = (1, queries, heads, width), (1, keys, kv_heads, width), (1, keys, kv_heads, value)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    first, second = (jnp.asarray(rng.integers(0, 3, (1, size)), jnp.int32) for size in (queries, keys))
    documents = (jnp.sort(first), jnp.sort(second)) if case["sorted"] else (first, second)
    config = AttentionConfig(MASKS[case["mask"]], float(rng.uniform(0.05, 0.3)))
    inputs = AttentionInputs(documents, case["start"])
    cotangents = rng.standard_normal((1, queries, heads, value)), rng.standard_normal((1, queries, heads))
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    if case["forward"]:
        ours = attention_gpu(q, k, v, config, inputs, interpret=interpret)
    else:
        attend = partial(attention_gpu, config=config, inputs=inputs, interpret=interpret)
        ours = gradients(attend, (q, k, v), cotangents)
    wide = tuple(x.astype(jnp.float32) for x in (q, k, v))
    expected = gradients(partial(attention_reference, config=config, inputs=inputs), wide, cotangents)
    return {name: relative(*pair) for name, *pair in zip(NAMES[: len(ours)], ours, expected[: len(ours)], strict=True)}


def gradients(attend, operands, cotangents):
    """Output, log-sum-exp, and the gradients of the operands; none of the log-sum-exp of a query that sees nothing."""
    (out, lse), backward = jax.vjp(attend, *operands)
    dlse = jnp.where(jnp.isfinite(lse), jnp.asarray(cotangents[1], lse.dtype), 0)
    return out, lse, *backward((jnp.asarray(cotangents[0], out.dtype), dlse))


def relative(actual, expected) -> float:
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    if (np.isfinite(actual) != np.isfinite(expected)).any():
        return float("inf")
    seen = np.isfinite(expected)
    return float(np.linalg.norm(actual[seen] - expected[seen]) / np.linalg.norm(expected[seen]))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
