"""Rows that are sent to experts in 8 bits: what these would have rounded themselves, number for number."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon import axes
from axon.layout import Execution, Layout, sequence_parallel
from axon.nn import Inputs, MoE, Routing, moe
from axon.nn.low_precision import LowPrecision
from axon.plan.collectives import collectives
from axon.plan.hlo import array_bytes
from axon.precision import MXFP8, FP8Block, FP8Current, Int8, Precision
from axon.runtime import Runtime

DIMS = {"embed": 64, "mlp": 16, "experts": 4}
BATCH, SEQ, K = 4, 8, 2
RESIDUAL = "batch seq.residual embed"
WEIGHTS = "gate", "up", "down"
RECIPES = {
    "int8": Int8(emulate=True, paths=WEIGHTS),
    "tensor": FP8Current(emulate=True, paths=WEIGHTS),
    "row": FP8Current(share="row", emulate=True, paths=WEIGHTS),
    "by int8 itself": Int8(paths=WEIGHTS),
}
LAYOUTS = [
    Layout({"data": 1}),
    Layout({"expert": 4}),
    Layout({"expert": 2, "tensor": 2}, rows=sequence_parallel()),
    Layout({"data": 2, "expert": 2}, zero=3),
    Layout({"data": 2, "tensor": 2}, rows={"experts": None}, params={"experts": "tensor", "mlp.expert": None}),
]


@dataclass(frozen=True)
class Model:
    routing: Routing = Routing(DIMS["experts"], K)

    def build(self) -> nnx.Module:
        return MoE(DIMS, self.routing)


def nested(flat):
    return nnx.traversals.unflatten_mapping({tuple(path.split("/")): value for path, value in flat.items()})


class Layer:
    """A layer of experts by a recipe on a layout: `y`, and the gradients for all parameters and `x`."""

    def __init__(self, recipe, layout, compute="float32", **execution):
        devices = jax.devices()[: int(np.prod([*layout.mesh.values()]))]
        options: Any = {"precision": Precision(compute=compute), "execution": Execution(**execution)}
        self.runtime = Runtime(Model(), layout, transforms=[LowPrecision(recipe)], devices=devices, **options)
        documents = np.zeros((BATCH, SEQ), np.int32)
        inputs = Inputs(documents, documents, documents)

        def both(values, x, dy):
            def run(values, x):
                router = {p: jnp.zeros(spec.shape, spec.dtype) for p, spec in self.runtime.variables.items()}
                layer = self.runtime.bind(nested(values), nested(router))
                return layer(axes.shard(x, RESIDUAL), inputs)[0]

            y, backward = jax.vjp(run, values, x)
            return y, *backward(axes.shard(dy.astype(y.dtype), RESIDUAL))

        self.fn = self.runtime.jit(both)

    def placed(self, values, x, dy):
        """As the layout has them."""
        placement, specs = self.runtime.placement, self.runtime.parameters
        x, dy = (jax.device_put(one, placement.sharding(("batch", "seq", "embed"))) for one in (x, dy))
        return (
            {p: jax.device_put(v, placement.sharding(specs[p].axes, specs[p].kind)) for p, v in values.items()},
            x,
            dy,
        )

    def __call__(self, *operands):
        with self.runtime.tracing():
            return jax.device_get(self.fn(*self.placed(*operands)))

    def drawn(self, rng):
        """Parameters; `x`, each token of a magnitude of its own; a cotangent."""
        values = {p: rng.normal(size=s.shape).astype(np.float32) for p, s in self.runtime.parameters.items()}
        x, dy = (rng.normal(size=(BATCH, SEQ, DIMS["embed"])) for _ in range(2))
        return values, (x * 10.0 ** rng.uniform(-3, 3, (BATCH, SEQ, 1))).astype(np.float32), dy.astype(np.float32)


def check_equal(actual, expected):
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(actual))


@pytest.fixture
def unsent(monkeypatch):
    """The same layer, whose rows are sent in the compute dtype."""

    def make(*arguments, **options):
        layer = Layer(*arguments, **options)
        call = layer.fn

        def fn(*operands):
            with monkeypatch.context() as patch:
                patch.setattr(moe, "sent_format", lambda *_: None)
                return call(*operands)

        layer.fn = fn
        return layer

    return make


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(name=("int8", "tensor"), options=({"capacity_factor": 1.0},))
@pytest.mark.parametrize("options", [{"capacity_factor": 1.0}, {"compute": "bfloat16"}], ids=["overflow", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "expert", "tensor", "zero 3", "shared"])
@pytest.mark.parametrize("name", RECIPES)
def test_results_and_gradients_are_those_of_rows_that_experts_round(name, layout, options, rng, unsent):
    """To the bit, and with overflow rounds too."""
    layer = Layer(RECIPES[name], layout, **options)
    drawn = layer.drawn(rng)
    check_equal(layer(*drawn), unsent(RECIPES[name], layout, **options)(*drawn))


@pytest.mark.full
def test_a_ragged_exchange_gives_the_same(rng, ways, unsent, monkeypatch):
    monkeypatch.setitem(moe.DISPATCHERS, "padded", ways["ragged"])
    layer = Layer(RECIPES["row"], LAYOUTS[1], capacity_factor=4.0)
    drawn = layer.drawn(rng)
    check_equal(layer(*drawn), unsent(RECIPES["row"], LAYOUTS[1], capacity_factor=4.0)(*drawn))


def exchanged(layer, drawn):
    """dtype → bytes of all-to-alls of more than a number a row, on one device."""
    with layer.runtime.tracing():
        text = layer.fn.lower(*layer.placed(*drawn)).compile().as_text()
    totals = {}
    for one in collectives(text):
        for dtype, shape in one.arrays if one.kind == "all-to-all" else ():
            if shape[-1:] == (DIMS["embed"],):
                totals[dtype] = totals.get(dtype, 0) + array_bytes([(dtype, shape)])
    return totals


@pytest.mark.full
@pytest.mark.draws(1)
def test_the_forward_s_rows_are_sent_in_8_bits_and_all_else_in_the_compute_dtype(rng):
    """The forward's dispatch and combine, and the backward's of each."""
    layer = Layer(RECIPES["int8"], LAYOUTS[1], capacity_factor=4.0)
    size = BATCH * SEQ * K * DIMS["embed"]  # each device sends all its copies to any of 4
    assert exchanged(layer, layer.drawn(rng)) == {"s8": size, "f32": 3 * 4 * size}


@pytest.mark.parametrize(
    ("recipe", "is_sent"),
    [
        (RECIPES["tensor"], True),
        (FP8Block(emulate=True, paths=WEIGHTS), False),
        (MXFP8(emulate=True, paths=WEIGHTS), False),
        (Int8(emulate=True, paths=("gate", "down")), False),
    ],
    ids=["tensor", "block", "mx", "gate alone"],
)
def test_rows_of_which_more_is_needed_are_sent_as_they_are(recipe, is_sent, rng):
    """Blocks have scales of their own in the weight's gradient; and gate and up have the rows in common."""
    layer = Layer(recipe, LAYOUTS[1], capacity_factor=4.0)
    with layer.runtime.tracing():
        text = layer.fn.lower(*layer.placed(*layer.drawn(rng))).as_text()
    sent = re.findall(r"all_to_all.*-> tensor<\d+x64xf(\d+)", text)
    assert sent.count("32") == 4 - is_sent
    assert sent.count("8") == is_sent
