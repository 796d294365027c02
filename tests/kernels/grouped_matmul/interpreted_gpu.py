"""The Hopper kernels in the interpreter, races detected, with several sizes of the groups. Prints, as JSON, how far
each result is at most from the formula's in float64, relative in norm, and whether what must be zero is. Run in a
process of its own: a wait that nothing ends hangs it.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.grouped_matmul.gpu_gradient import weight_gradient
from axon.kernels.grouped_matmul.gpu_product import product

HOW = {"interpret": plgpu.InterpretGPUParams(detect_races=True), "blocks": 2}


def main(case: dict) -> dict:
    rng, (rows, embed, out, groups) = np.random.default_rng(case["seed"]), case["shape"]
    accumulate, wanted = jnp.dtype(case["accumulate"]), case["results"]

    @jax.jit
    def run(x, w, sizes, dy):
        results = {
            "y": lambda: product(x, w, sizes, transposed=False, **HOW),
            "dx": lambda: product(dy, w, sizes, transposed=True, **HOW),
            "dw": lambda: weight_gradient(x, dy, sizes, dtype=accumulate, **HOW),
        }
        return {name: results[name]() for name in wanted}

    found = []
    for _ in range(case["draws"]):
        sizes = drawn(rng, rows, groups)
        shapes = (rows, embed), (groups, embed, out), (rows, out)
        x, w, dy = (np.asarray(rng.standard_normal(shape), jnp.dtype(case["dtype"])) for shape in shapes)
        x[sizes.sum() :] = dy[sizes.sum() :] = np.nan
        found.append(compare(run(x, w, sizes, dy), formula(x, w, sizes, dy)))
    errors = {name: max(one[name] for one in found) for name in wanted}
    return {"errors": errors, "zeros": all(one["zeros"] for one in found)}


def drawn(rng, rows, groups):
    """Sizes with an empty group, that begin and end anywhere, and whose sum is below the rows."""
    ends = np.sort(rng.integers(0, rows, groups - 1))
    return np.insert(np.diff(ends, prepend=0), rng.integers(groups), 0).astype(np.int32)


def formula(x, w, sizes, dy):
    """float64, a group at a time."""
    x, w, dy = (np.asarray(one, np.float64) for one in (x, w, dy))
    results = {"y": np.zeros(dy.shape), "dx": np.zeros(x.shape), "dw": np.zeros(w.shape)}
    for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        own = slice(end - size, end)
        results["y"][own], results["dx"][own] = x[own] @ w[group], dy[own] @ w[group].T
        results["dw"][group] = x[own].T @ dy[own]
    return results


def compare(actual, expected):
    actual = {name: np.asarray(one, np.float64) for name, one in actual.items()}
    zeros = all(not np.any(one[expected[name] == 0]) for name, one in actual.items())
    return {name: relative(one, expected[name]) for name, one in actual.items()} | {"zeros": zeros}


def relative(actual, expected):
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-3))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
