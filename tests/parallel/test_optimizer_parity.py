"""The numerics contract for every optimizer: what it makes of gradients, and a whole training, do not depend on the
layout."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import ONE, Problem, devices

from axon.axes import ArraySpec
from axon.layout import Layout, sequence_parallel
from axon.runtime import Runtime, flattened, nested
from axon.train.optimizers import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    Constant,
    Group,
    Lion,
    Muon,
    Optax,
    ScheduleFreeAdamW,
)
from axon.train.state import State
from axon.train.update import Descent
from models.llama import Llama

MODEL = Llama(vocab=61, vocab_multiple=64, embed=32, layers=2, heads=8, kv_heads=4, mlp=64)
STEPS = 4

EPS = 1e-5
"""Of Adam: with 1e-8 what rounding leaves of gradients near zero makes whole steps, and layouts then differ by more."""

REST = AdamW(Constant(3e-3), eps=EPS)
OPTIMIZERS: dict[str, Any] = {
    "Lion": Lion(Constant(1e-3), b1=0.75, b2=0.25, clip=None),  # of the gradients below exact sums, none of them zero
    "SGD": SGD(Constant(0.1), nesterov=True),
    "Adafactor": Adafactor(Constant(1e-2), b1=0.9),
    "Muon": Muon(Constant(1e-2), REST),
    "Muon by head": Muon(Constant(1e-2), REST, scale="rms", steps=3, separate=("heads", "kv_heads")),
    "EMA": EMA(AdamW(Constant(3e-3), eps=EPS, groups=(Group("embedding/*", frozen=True),)), decay=0.5),
    "SOAP": SOAP(Constant(3e-3), every=2, largest=40, eps=1e-3),  # a small eps makes a sign of Adam's first step
    "schedule-free": ScheduleFreeAdamW(Constant(3e-3), eps=EPS),
    "8 bits": AdamW(Constant(3e-3), eps=EPS, moments="dynamic8"),
    "FP8": AdamW(Constant(3e-3), eps=EPS, moments="fp8"),
    "bfloat16": Muon(Constant(1e-2), replace(REST, moments="bfloat16"), moments="bfloat16"),
    "Optax": Optax(optax.adabelief, Constant(1e-3)),
}
PROBLEMS = {
    name: Problem(MODEL, optimizer=optimizer, sequences=8, seq=16, steps=STEPS)
    for name, optimizer in OPTIMIZERS.items()
}
LAYOUTS = {
    "zero 0": Layout({"data": 4}),
    "zero 1": Layout({"data": 4}, zero=1),
    "zero 2": Layout({"data": 4}, zero=2),
    "zero 3": Layout({"data": 4}, zero=3),
    "tensor": Layout({"tensor": 4}),
    "auto": Layout({"data": 2, "tensor": 2}, zero=3, auto=True),
    "replica": Layout({"replica": 2, "data": 2, "tensor": 2}, zero=3, microbatches=2),
    "composed": Layout({"data": 2, "tensor": 4}, zero=3),
    "sequence": Layout({"data": 4, "tensor": 2}, zero=1, rows=sequence_parallel(), microbatches=2),
    "pipeline": Layout({"pipe": 2, "data": 2}, zero=1, microbatches=2),
}


@dataclass(frozen=True)
class Trained:
    """What some steps made: losses and gradient norms, and the parameters and the evaluated ones after them."""

    curve: np.ndarray
    parameters: Any
    evaluated: Any


def check(ours: Trained, expected: Trained):
    np.testing.assert_allclose(ours.curve, expected.curve, rtol=1e-5)
    pairs = ((ours.parameters, expected.parameters), (ours.evaluated, expected.evaluated))
    for made, wanted in pairs:
        for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(wanted), strict=True):
            error = np.linalg.norm(one - other) / np.linalg.norm(other)
            assert error <= 1e-5, (jax.tree_util.keystr(path), error)


# ---- given gradients, all else of a step: clipping, the update, its state -----------------------------------------


@pytest.fixture(scope="module")
def gradients(shared_seed):
    """Initial values and the gradients of some steps, by path, drawn once: odd multiples of 1/128, whose squared norm
    is exact in any order, so that what is rounded to few bits, or to a sign, is the same number on every layout."""
    rng = np.random.default_rng(shared_seed)
    parameters = Runtime(MODEL, ONE, devices=devices(ONE)).parameters

    def draw():
        draws = {path: rng.normal(0, 6.4, spec.shape) for path, spec in parameters.items()}
        return {path: ((2 * np.floor(x) + 1) / 128).astype(np.float32) for path, x in draws.items()}

    return draw(), [draw() for _ in range(STEPS)]


def begun(optimizer, gradients) -> State:
    """The state before the first step, wherever it will lie."""
    update = Descent(Runtime(MODEL, ONE, devices=devices(ONE)), optimizer)
    values = nested(gradients[0])
    return jax.device_get(State(jnp.int32(0), values, jax.jit(update.init)(values)))


def updated(optimizer, layout, given, start, gradients) -> Trained:
    runtime = Runtime(MODEL, layout, devices=devices(layout))
    update = Descent(runtime, optimizer)
    specs = State(ArraySpec((), (), jnp.int32), nested(runtime.parameters), update.specs(runtime.parameters))
    places = runtime.abstract(specs)
    state = jax.device_put(start, jax.tree.map(lambda a: a.sharding, places))
    with runtime.tracing():
        step = runtime.jit(lambda state, batch: update.step(given(runtime), state, batch)[:2])
        norms = []
        for batch in gradients[1]:
            state, metrics = step(state, batch)
            norms.append(float(metrics["grad_norm"]))
        evaluated = update.evaluated(state)
    for made, promised in zip(jax.tree.leaves(state), jax.tree.leaves(places), strict=True):
        assert made.sharding.is_equivalent_to(promised.sharding, made.ndim)
        assert made.dtype == promised.dtype
    return Trained(np.asarray(norms), *jax.device_get((flattened(state.parameters), flattened(evaluated))))


@pytest.fixture(scope="module")
def made_on_one_device(given, gradients):
    """made_on_one_device(name): the state before the first step, and what an optimizer makes of the gradients there."""

    @cache
    def made(name: str) -> tuple[State, Trained]:
        start = begun(OPTIMIZERS[name], gradients)
        return start, updated(OPTIMIZERS[name], ONE, given, start, gradients)

    return made


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("layout", ["composed", "auto"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_made_of_gradients_does_not_depend_on_the_layout(name, layout, given, gradients, made_on_one_device):
    start, expected = made_on_one_device(name)
    check(updated(OPTIMIZERS[name], LAYOUTS[layout], given, start, gradients), expected)


# ---- a whole training ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(packed_batch, shared_seed):
    """Seed and batches, drawn once."""
    return shared_seed, PROBLEMS["Muon"].batches(np.random.default_rng(shared_seed), packed_batch)


@pytest.fixture(scope="module")
def on_one_device(drawn):
    """on_one_device(name): what an optimizer makes of them there."""
    done: dict[str, Trained] = {}

    def train(name: str) -> Trained:
        if name not in done:
            done[name] = trained(name, ONE, drawn)
        return done[name]

    return train


def trained(name, layout, drawn) -> Trained:
    seed, batches = drawn
    program = PROBLEMS[name].program(layout, seed)
    state, curve = program.init(), []
    for batch in batches:
        state, metrics = program.step(state, program.place(batch))
        curve.append(jax.device_get((metrics["loss"], metrics["grad_norm"])))
    return Trained(np.asarray(curve), *jax.device_get((state.parameters, program.evaluated(state))))


@pytest.mark.full
@pytest.mark.some(name=("Muon",), layout=("composed",))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Lion"])  # whose signs may be rounding's
def test_training_does_not_depend_on_any_layout(name, layout, drawn, on_one_device):
    check(trained(name, LAYOUTS[layout], drawn), on_one_device(name))
