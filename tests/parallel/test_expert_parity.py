"""Training a mixture of experts does not depend on the layout: losses, gradients, what its variables become."""

import math
import secrets
from dataclasses import replace

import jax
import numpy as np
import pytest

from axon.layout import Layout, sequence_parallel
from axon.nn import Routing
from axon.parallel.outer import DiLoCo
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.mixtral import Mixtral

pytestmark = pytest.mark.full  # what a step is made of is in tests/nn/test_moe.py

ROUTING = Routing(8, 2, sequence_loss=0.01, global_loss=0.01, z_loss=0.001, bias_rate=0.01)
MODEL = Mixtral(
    vocab=61,
    vocab_multiple=64,
    embed=32,
    layers=2,
    heads=4,
    kv_heads=2,
    mlp=16,
    routing=ROUTING,
    shared=16,
    margin=1.0,
    remat=("dispatched",),
    unroll=False,
)
SEQUENCES, SEQ, STEPS = 8, 16, 3
OPTIMIZER = AdamW(Constant(1e-3), eps=1e-4, clip=None)  # see test_parity
FOLDED = {
    "rows": {"seq.expert": ("context", "tensor")},
    "params": {"experts": ("expert", "tensor"), "mlp.expert": None},
}
LAYOUTS = [
    Layout({"expert": 2, "tensor": 2}, rows=sequence_parallel(), microbatches=2),
    Layout({"data": 2, "expert": 2}, zero=3, microbatches=2),
    Layout({"expert": 8}),
    Layout({"data": 2, "expert": 2, "tensor": 2}, zero=1),
    Layout({"data": 2, "expert": 2, "tensor": 2}, zero=3, **FOLDED),
    Layout({"data": 2, "expert": 2, "context": 2}, zero=2),
    Layout({"replica": 2, "data": 2, "expert": 2}, zero=3),
    Layout({"data": 2, "expert": 2, "tensor": 2}, zero=3, auto=True),
    Layout({"data": 2, "expert": 2}, zero=2, host=("params", "optimizer")),
    Layout({"pipe": 2, "expert": 2}, microbatches=2),
    Layout({"pipe": 2, "expert": 2, "tensor": 2}, microbatches=4, zero=1),
    Layout({"pipe": 2, "data": 2, "expert": 2}, microbatches=2, zero=3, pad_layers=True),
]


def described(layout):
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    return f"{mesh}, zero {layout.zero}, microbatches {layout.microbatches}{', auto' * layout.auto}"


def train(program, state, batches):
    """The first step's gradients, the variables after all, and the metrics of every step."""
    curve, gradients = [], None
    for batch in batches:
        state, metrics = program.step(state, program.place(batch))
        curve.append({name: float(value) for name, value in metrics.items() if name not in ("norms", "tokens")})
        if gradients is None:  # Adam's first moment after one step is (1 − b1) of the gradient
            moment = state.optimizer["direction"].mu
            gradients = jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - OPTIMIZER.b1), moment)
    return gradients, jax.device_get(state.variables), curve


@pytest.fixture(scope="module")
def expected(packed_batch):
    seed = secrets.randbits(31)
    rng = np.random.default_rng(seed)
    batches = [packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab) for _ in range(STEPS)]
    one = Program(MODEL, Layout({"data": 1}), OPTIMIZER, batch=SEQUENCES, seq=SEQ, seed=seed, devices=jax.devices()[:1])
    return seed, batches, *train(one, one.init(), batches)


@pytest.mark.parametrize("layout", LAYOUTS, ids=described)
def test_gradients_variables_and_metrics_do_not_depend_on_the_layout(layout, expected):
    seed, batches, gradients, variables, curve = expected
    print(f"seed {seed}")
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    program = Program(MODEL, layout, OPTIMIZER, batch=SEQUENCES, seq=SEQ, seed=seed, devices=devices)
    found, our_variables, our_curve = train(program, program.init(), batches)
    whole = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(gradients), strict=True):
        error = np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-3 * whole)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(our_variables), jax.tree.leaves(variables), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, err_msg=jax.tree_util.keystr(path))
    for one, other in zip(our_curve, curve, strict=True):
        assert one.keys() == other.keys() >= {"balance", "global_balance", "router_z", "expert_load"}
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_ring_drops_the_tokens_that_one_device_does(packed_batch, rng):
    model = replace(MODEL, routing=replace(ROUTING, capacity=1.0))
    ring = Layout({"context": 2, "expert": 2}, context="ring")
    batches, curves = [packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab)], []
    for layout, devices in ((Layout({"data": 1}), 1), (ring, 4)):
        program = Program(model, layout, OPTIMIZER, batch=SEQUENCES, seq=SEQ, devices=jax.devices()[:devices])
        curves += train(program, program.init(), batches)[2]
    assert curves[0]["expert_dropped"] > 0
    for name, value in curves[0].items():
        np.testing.assert_allclose(curves[1][name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_replicas_that_train_separately_have_experts(packed_batch, rng):
    layout = Layout({"replica": 2, "expert": 2})
    devices = jax.devices()[:4]
    program = Program(MODEL, layout, OPTIMIZER, batch=SEQUENCES, seq=SEQ, outer=DiLoCo(every=2), devices=devices)
    state, losses = program.init(), []
    batch = packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab)
    for _ in range(4):
        state, metrics = program.step(state, program.place(batch))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
