"""The numerics contract for every optimizer: losses, gradient norms and parameters do not depend on the layout."""

import math
import secrets
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import pytest

from axon.layout import Layout, sequence_parallel
from axon.train.optimizers import EMA, SGD, Adafactor, AdamW, Constant, Group, Lion, Muon, Optax
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=61, vocab_multiple=64, embed=32, layers=2, heads=8, kv_heads=4, mlp=64)
SEQUENCES, SEQ, STEPS = 8, 16, 4

ADAMW = AdamW(Constant(3e-3), clip=None)
OPTIMIZERS: dict[str, Any] = {
    "Lion": Lion(Constant(1e-3), clip=None),
    "SGD": SGD(Constant(0.1), nesterov=True),
    "Adafactor": Adafactor(Constant(1e-2), b1=0.9),
    "Muon": Muon(Constant(1e-2), ADAMW),
    "Muon by head": Muon(Constant(1e-2), ADAMW, scale="rms", steps=3, separate=("heads", "kv_heads")),
    "EMA": EMA(AdamW(Constant(3e-3), groups=(Group("embedding/*", frozen=True),)), decay=0.5),
    "Optax": Optax(optax.adabelief, Constant(1e-3)),
}
COMPOSED = {
    "Lion": Layout({"data": 2, "tensor": 2}, zero=2, microbatches=2),
    "SGD": Layout({"data": 4}, zero=1),
    "Adafactor": Layout({"data": 2, "tensor": 4}, zero=3),
    "Muon": Layout({"data": 2, "tensor": 4}, zero=3),
    "Muon by head": Layout({"data": 4, "tensor": 2}, zero=1, rows=sequence_parallel(), microbatches=2),
    "EMA": Layout({"replica": 2, "data": 2}, zero=3),
    "Optax": Layout({"data": 2, "tensor": 2}, zero=1, auto=True),
}
EVERY = [
    Layout({"data": 4}),
    Layout({"data": 4}, zero=1),
    Layout({"data": 4}, zero=2),
    Layout({"data": 4}, zero=3),
    Layout({"tensor": 4}),
    Layout({"data": 2, "tensor": 2}, zero=3, auto=True),
    Layout({"replica": 2, "data": 2, "tensor": 2}, zero=3, microbatches=2),
]


@dataclass(frozen=True)
class Trained:
    """What some steps made: losses and gradient norms, and the parameters and the evaluated ones after them."""

    curve: np.ndarray
    parameters: Any
    evaluated: Any


@pytest.fixture(scope="module")
def drawn(packed_batch):
    """Seed and batches, drawn once."""
    seed = secrets.randbits(31)
    rng = np.random.default_rng(seed)
    return seed, [packed_batch(rng, SEQUENCES, SEQ, MODEL.vocab) for _ in range(STEPS)]


@pytest.fixture(scope="module")
def on_one_device(drawn):
    """on_one_device(name): what an optimizer makes of them there."""
    done: dict[str, Trained] = {}

    def train(name: str) -> Trained:
        if name not in done:
            done[name] = trained(OPTIMIZERS[name], Layout({"data": 1}), drawn)
        return done[name]

    return train


def trained(optimizer, layout, drawn) -> Trained:
    seed, batches = drawn
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    program = Program(MODEL, layout, optimizer, batch=SEQUENCES, seq=SEQ, seed=seed, devices=devices)
    state, curve = program.init(), []
    for batch in batches:
        state, metrics = program.step(state, program.place(batch))
        curve.append(jax.device_get((metrics["loss"], metrics["grad_norm"])))
    for made, promised in zip(jax.tree.leaves(state), jax.tree.leaves(program.abstract_state()), strict=True):
        assert made.sharding.is_equivalent_to(promised.sharding, made.ndim)
    return Trained(np.asarray(curve), *jax.device_get((state.parameters, program.evaluated(state))))


def check(name, layout, drawn, on_one_device):
    print(f"seed {drawn[0]}")
    ours, expected = trained(OPTIMIZERS[name], layout, drawn), on_one_device(name)
    np.testing.assert_allclose(ours.curve, expected.curve, rtol=1e-5)
    for made, wanted in ((ours.parameters, expected.parameters), (ours.evaluated, expected.evaluated)):
        for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(wanted), strict=True):
            error = np.linalg.norm(one - other) / np.linalg.norm(other)
            assert error <= 1e-5, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_do_not_depend_on_a_composed_layout(name, drawn, on_one_device):
    check(name, COMPOSED[name], drawn, on_one_device)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EVERY, ids=lambda layout: f"{dict(layout.mesh)}, zero {layout.zero}")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_do_not_depend_on_any_layout(name, layout, drawn, on_one_device):
    check(name, layout, drawn, on_one_device)
