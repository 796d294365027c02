"""What three-dimensional tensor parallelism sends, from the compiled program, against AxoNN's formulas (2305.13525)."""

import jax
import numpy as np
import pytest

from axon import axes
from axon.axes import einsum, shard
from axon.layout import Layout, Placement, tensor_3d
from axon.plan.compiled import collectives

FLOAT = 4  # bytes


class Weight:
    def __init__(self, value, names):
        self.value, self.axes = value, tuple(names.split())

    def get_value(self):
        return self.value


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 1, 4)], ids=str)
def test_a_matmul_sends_what_the_formulas_say(sizes, rng):
    depth, inputs, outputs = sizes
    rows, k, n = (8 * int(rng.integers(1, 5)) for _ in range(3))
    layout = Layout({"z": depth, "x": inputs, "y": outputs}, **tensor_3d())
    placement = Placement.of(layout, jax.devices()[:8])

    def step(x, w, dy):
        x, dy = shard(x, "batch embed"), shard(dy, "batch mlp")
        w = shard(w, "embed mlp", "params")
        made, backward = jax.vjp(
            lambda x, w: einsum("batch embed, embed mlp -> batch mlp", x, Weight(w, "embed mlp")), x, w
        )
        return made, backward(dy)[0]

    shapes = [(rows, k), (k, n), (rows, n)]
    names = [("batch embed", "activations"), ("embed mlp", "params"), ("batch mlp", "activations")]
    shardings = [placement.sharding(tuple(pattern.split()), kind) for pattern, kind in names]
    abstract = [jax.ShapeDtypeStruct(s, np.float32, sharding=p) for s, p in zip(shapes, shardings, strict=True)]
    with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh), axes.activate(axes.Scope(placement)):
        text = jax.jit(lambda *o: step(*o)).lower(*abstract).compile().as_text()

    def volume(kind):
        ways = {"all-gather": 1, "all-reduce": 2}[kind]
        return sorted(ways * one.bytes / FLOAT for one in collectives(text) if one.kind == kind)

    gathers = [n * k / (inputs * outputs)] if depth > 1 else []
    sums = [2 * rows * n / (depth * outputs)] * (inputs > 1) + [2 * rows * k / (depth * inputs)] * (outputs > 1)
    gathered = volume("all-gather")
    assert gathered in (gathers, 2 * gathers), "once, or again in the backward"
    assert volume("all-reduce") == sorted(sums)
