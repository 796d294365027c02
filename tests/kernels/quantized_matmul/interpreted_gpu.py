"""One case of the Hopper kernel in the interpreter, races detected. Prints, as JSON, the largest error of a result as a
share of its bound. Run in a process of its own: a wait that nothing ends hangs it.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.quantized_matmul import Granularity, k_major, quantize, quantized_matmul_reference
from axon.kernels.quantized_matmul.gpu import quantized_matmul_gpu


def main(case: dict) -> float:
    """Float32 sums of k products err by k·2⁻²⁴ of the sum of their sizes at most, and scaling by 3 roundings more."""
    rng, dtype = np.random.default_rng(case["seed"]), jnp.dtype(case["dtype"])
    rows, inner, out = case["shape"]
    x, w = (
        quantize(jnp.asarray(rng.standard_normal(shape), jnp.float32), dtype, Granularity(*how))
        for shape, how in zip(((rows, inner), (inner, out)), case["granularities"], strict=True)
    )
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    ours = quantized_matmul_gpu(x, k_major(w), jnp.dtype(case["out"]), blocks=case["blocks"], interpret=interpret)
    sizes = [operand._replace(values=jnp.abs(operand.values.astype(jnp.float32))) for operand in (x, w)]
    exact, size = (np.asarray(quantized_matmul_reference(x, w, jnp.float32), np.float64) for x, w in ((x, w), sizes))
    rounding = 2.0**-8 * np.abs(exact) if case["out"] == "bfloat16" else 0
    bound = (inner + 4) * 2.0**-24 * size + rounding
    return float(np.max(np.abs(np.asarray(ours, np.float64) - exact) / bound))


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
