"""One case of the Hopper kernel in the interpreter, races detected. Prints how far the output is from the reference's
in float32, relative in norm. Run in a process of its own: a wait that nothing ends hangs it.
"""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from axon.kernels.paged_attention import gpu_work
from axon.kernels.paged_attention.gpu import paged_attention_gpu
from axon.kernels.paged_attention.reference import paged_attention_reference
from scripts.bench.gpu_paged import Problem, drawn


def main(seed: int, padding: int, splits: bool, **case) -> float:
    problem = Problem("interpreted", **case)
    rows, cache, inputs = drawn(problem, seed)
    rows = [jnp.pad(x, ((0, padding), (0, 0), (0, 0))) for x in rows]
    if splits:
        gpu_work.PART, gpu_work.WAVES = 1, 1
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    ours, written = paged_attention_gpu(*rows, cache, inputs, problem.config, interpret=interpret)
    wide = (x.astype(jnp.float32) for x in rows)
    expected, after = paged_attention_reference(*wide, cache, inputs, problem.config)
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a[1:], np.float32), np.asarray(b[1:], np.float32))  # noqa: E731
    jax.tree.map(same, written, after)
    ours, expected = (np.asarray(x, np.float64) for x in (ours, expected))
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


if __name__ == "__main__":
    print(main(**json.loads(sys.argv[1])))
