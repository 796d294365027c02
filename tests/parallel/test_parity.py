"""The numerics contract: loss and gradients do not depend on the layout, on its mode, or on microbatches."""

import itertools
import secrets

import jax
import numpy as np
import pytest

from axon.layout import Layout
from axon.train.optimizer import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=32, layers=2, heads=8, kv_heads=4, mlp=64, tied=True)
ROWS, SEQ, STEPS = 16, 32, 10
OPTIMIZER = AdamW(Constant(1e-3), clip=None)

DATA, FSDP_TENSOR, TENSOR = {"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "tensor": 4}
HYBRID, CONTEXT = {"replica": 2, "data": 2, "tensor": 2}, {"context": 2, "data": 4}
SEQUENCE_PARALLEL = {"seq.residual": ("context", "tensor")}

FEW = [
    Layout(FSDP_TENSOR, zero=3),
    Layout(HYBRID, zero=2, microbatches=2, rows=SEQUENCE_PARALLEL),
    Layout(CONTEXT, zero=1, microbatches=4),
    Layout(TENSOR, zero=3, microbatches=2, auto=True),
]
GRID = [
    Layout(mesh, zero=stage, auto=auto, microbatches=parts)
    for mesh, stage, auto, parts in itertools.product(
        (DATA, FSDP_TENSOR, TENSOR, HYBRID, CONTEXT), range(4), (False, True), (1, 2, 4)
    )
    if ROWS % (mesh.get("data", 1) * mesh.get("replica", 1) * parts) == 0
]
ODD = [
    Layout({"data": 2, "tensor": 4}, rows={"kv_heads": None}),
    Layout({"data": 2, "tensor": 4}, rows={"heads": None}),
    Layout({"data": 2, "context": 4}, rows={"kv_seq": "context"}),
    Layout({"data": 2, "tensor": 2, "x": 2}, rows={"embed": "x"}, zero=3, order=("data", "tensor", "x")),
    Layout({"data": 4, "tensor": 2}, rows={"vocab": "data"}),
    Layout({"data": 8}, params={"mlp": "data"}),
    Layout({"data": 4, "tensor": 2}, params={"embed": "data"}, optimizer={"embed": None}),
]


def described(layout):
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    mode = "auto" if layout.auto else "explicit"
    return f"{mesh}, zero {layout.zero}, {mode}, microbatches {layout.microbatches}, {dict(layout.rows)}"


def train(program, state, batches):
    """First gradients by path, and losses and gradient norms of every step."""
    curve, gradients = [], None
    for batch in batches:
        state, metrics = program.step(state, program.place(batch))
        curve.append(jax.device_get((metrics["loss"], metrics["grad_norm"])))
        if gradients is None:  # Adam's first moment after one step is (1 − b1) of the gradient
            moment = state.optimizer[0].mu
            gradients = jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - OPTIMIZER.b1), moment)
    return gradients, np.asarray(curve)


@pytest.fixture(scope="module")
def expected(packed_batch):
    """Seed, batches and initial state, drawn once for all layouts, and what one device makes of them."""
    seed = secrets.randbits(31)
    rng = np.random.default_rng(seed)
    batches = [packed_batch(rng, ROWS, SEQ, MODEL.vocab) for _ in range(STEPS)]
    one = Program(MODEL, Layout({"data": 1}), OPTIMIZER, batch=ROWS, seq=SEQ, seed=seed, devices=jax.devices()[:1])
    start = jax.device_get(one.init())
    return seed, batches, start, *train(one, one.init(), batches)


def check(layout, expected):
    seed, batches, start, gradients, curve = expected
    print(f"seed {seed}")
    program = Program(MODEL, layout, OPTIMIZER, batch=ROWS, seq=SEQ)
    state = jax.device_put(start, jax.tree.map(lambda a: a.sharding, program.abstract_state()))
    ours, our_curve = train(program, state, batches)
    whole = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradients)))
    for path, one in jax.tree_util.tree_leaves_with_path(ours):
        other = gradients
        for key in path:
            other = other[key.key]
        error = np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-3 * whole)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)
    np.testing.assert_allclose(our_curve, curve, rtol=1e-5)


@pytest.mark.parametrize("layout", FEW, ids=described)
def test_gradients_and_ten_steps_do_not_depend_on_the_layout(layout, expected):
    check(layout, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRID, ids=described)
def test_gradients_and_ten_steps_do_not_depend_on_any_layout_of_the_grid(layout, expected):
    check(layout, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ODD, ids=described)
def test_gradients_and_ten_steps_do_not_depend_on_rows_that_nobody_expected(layout, expected):
    check(layout, expected)
