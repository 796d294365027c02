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
from axon.train.objective import MultiToken, NextToken
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.deepseek import DeepSeek
from models.gpt_oss import GptOss
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
DEEPSEEK = DeepSeek(
    vocab=61,
    vocab_multiple=64,
    embed=32,
    layers=4,
    first_dense=1,
    heads=4,
    mlp=48,
    expert_mlp=16,
    routing=Routing(8, 2, "sigmoid", scale=2.5, groups=4, kept_groups=2, bias_rate=0.01, sequence_loss=0.01),
    shared=16,
    q_latent=None,
    kv_latent=12,
    nope_dim=6,
    rope_dim=4,
    value_dim=8,
    multi_token=True,
    unroll=False,
)
GPT_OSS = GptOss(61, 32, 4, 4, 2, 16, 8, Routing(8, 2, z_loss=0.001), window=6, vocab_multiple=64, unroll=False)
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
FAMILY_LAYOUTS = [
    Layout({"data": 2, "expert": 2}, zero=3, microbatches=2),
    Layout({"pipe": 2, "expert": 2}, microbatches=2, pad_layers=True),
    Layout({"expert": 2, "tensor": 2}),
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


def on_one_device(model, objective, packed_batch):
    """A seed, batches, and what training on them gives."""
    seed = secrets.randbits(31)
    rng = np.random.default_rng(seed)
    batches = [packed_batch(rng, SEQUENCES, SEQ, model.vocab) for _ in range(STEPS)]
    one = program_of(model, objective, Layout({"data": 1}), seed)
    return seed, batches, *train(one, one.init(), batches)


def program_of(model, objective, layout, seed):
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    return Program(model, layout, OPTIMIZER, batch=SEQUENCES, seq=SEQ, seed=seed, objective=objective, devices=devices)


def check_same(model, objective, layout, expected):
    """Training on `layout` gives the same; returns the variables."""
    seed, batches, gradients, variables, curve = expected
    print(f"seed {seed}")
    program = program_of(model, objective, layout, seed)
    found, our_variables, our_curve = train(program, program.init(), batches)
    whole = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(gradients), strict=True):
        one = one[: len(other)] if other.ndim else one  # a stage may have layers that only fill it up
        error = np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-3 * whole)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(our_variables), jax.tree.leaves(variables), strict=True
    ):
        one = one[: len(other)] if other.ndim else one
        np.testing.assert_allclose(one, other, rtol=1e-4, err_msg=jax.tree_util.keystr(path))
    for one, other in zip(our_curve, curve, strict=True):
        assert one.keys() == other.keys() >= {"expert_load"}
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.fixture(scope="module")
def expected(packed_batch):
    found = on_one_device(MODEL, NextToken(), packed_batch)
    assert all(one.keys() >= {"balance", "global_balance", "router_z"} for one in found[-1])
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=described)
def test_gradients_variables_and_metrics_do_not_depend_on_the_layout(layout, expected):
    check_same(MODEL, NextToken(), layout, expected)


@pytest.fixture(scope="module")
def expected_of_deepseek(packed_batch):
    found = on_one_device(DEEPSEEK, MultiToken(), packed_batch)
    variables = found[3]
    for block in (variables["layers"]["experts"], variables["ahead"]["block"]):
        assert np.any(block["moe"]["router"]["bias"])
    assert all(one.keys() >= {"balance", "second_token"} for one in found[-1])
    return found


@pytest.fixture(scope="module")
def expected_of_gpt_oss(packed_batch):
    return on_one_device(GPT_OSS, NextToken(), packed_batch)


@pytest.mark.parametrize("layout", FAMILY_LAYOUTS, ids=described)
def test_deepseeks_two_kinds_of_layers_and_its_second_token_do_not_depend_on_the_layout(layout, expected_of_deepseek):
    check_same(DEEPSEEK, MultiToken(), layout, expected_of_deepseek)


@pytest.mark.parametrize("layout", FAMILY_LAYOUTS, ids=described)
def test_experts_with_biases_do_not_depend_on_the_layout(layout, expected_of_gpt_oss):
    check_same(GPT_OSS, NextToken(), layout, expected_of_gpt_oss)


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
