"""Optimizer state in files, updated one layer at a time: the same training, in less memory than the state takes."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axon.checkpoint import Checkpoints, Reader, Store
from axon.errors import UserError
from axon.layout import Layout, LayoutError
from axon.parallel.outer import DiLoCo
from axon.plan.memory import arguments, on_disk
from axon.runtime import nested
from axon.runtime.scratch import PREFIX
from axon.runtime.stored import StoredArray, is_stored
from axon.train.layers import leaves
from axon.train.objective import Sums
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
    OneBitAdam,
    Optax,
    ScheduleFreeAdamW,
)
from axon.train.step import Program
from models.gemma import Gemma
from models.llama import Llama

RATE = Constant(1e-2)
MODEL = Gemma(vocab=64, embed=16, layers=3, heads=2, kv_heads=2, mlp=32, head_dim=8, window=8, unroll=False)
SMALL = Llama(vocab=64, embed=16, layers=2, heads=2, kv_heads=2, mlp=32, unroll=False)

OPTIMIZERS = {
    "AdamW": AdamW(RATE, groups=(Group("*/mlp/*", rate=0.5), Group("embedding/*", frozen=True))),
    "Lion": Lion(RATE, momentum_dtype="bfloat16"),
    "SGD": SGD(RATE),
    "SGD without momentum": SGD(RATE, momentum=0.0),
    "Muon": Muon(RATE, AdamW(RATE), separate=("heads",)),
    "EMA": EMA(AdamW(RATE), decay=0.5),
    "Adafactor": Adafactor(RATE, b1=0.9),
    "SOAP": SOAP(RATE),
    "schedule-free": ScheduleFreeAdamW(RATE),
}
EXACT = ("Lion", "SGD", "SGD without momentum")
SPLIT: dict[str, Any] = {"mesh": {"data": 2, "tensor": 2}, "zero": 1}


def program(rule, folder, model: Any = SMALL, **layout):
    layout = {**SPLIT, "disk": {"optimizer": str(folder)} if folder else {}, **layout}
    count = int(np.prod(list(layout["mesh"].values())))
    return Program(model, Layout(**layout), rule, batch=4, seq=16, devices=jax.devices()[:count])


def fetched(tree):
    """The arrays of a state by place, those in files among them."""
    return {key: x.whole() if is_stored(x) else np.asarray(x) for key, x in leaves(tree).items()}


def assert_close(found, expected, tolerance: float):
    found, expected = fetched(found), fetched(expected)
    assert found.keys() == expected.keys()
    for key, other in expected.items():
        one, other = np.float32(found[key]), np.float32(other)
        np.testing.assert_allclose(
            one, other, rtol=tolerance, atol=tolerance * max(np.abs(other).max(), 1e-6), err_msg=key
        )


@pytest.fixture
def batches(rng, packed_batch):
    return [packed_batch(rng, 4, 16, 64) for _ in range(3)]


def trained(run, batches, state=None):
    state = run.init() if state is None else state
    for batch in batches:
        state, _ = run.step(state, run.place(batch))
    return state


@dataclass(frozen=True)
class Given:
    """Gradients that are what they are, of no objective."""

    gradients: Any

    def counts(self, batch):
        return {"tokens": jnp.ones(())}

    def __call__(self, state, batch, counts, frozen=()):
        return self.gradients, Sums({}, {})


def updated(run, seed, steps=3):
    """The state, and the parameters to evaluate, after updates by random gradients."""

    def step(state, gradients):
        return run.update.step(Given(gradients), state, {})[0]

    state, step = run.init(), run.runtime.jit(step)
    for number in range(steps):
        draws = {
            path: np.random.default_rng([seed, number, len(path)]).normal(size=spec.shape).astype(np.float32)
            for path, spec in run.parameters.items()
        }
        placed = jax.device_put(nested(draws), jax.tree.map(lambda x: x.sharding, state.parameters))
        with run.runtime.tracing():
            state = step(state, placed)
            state = run.update.finish(state) if run.runtime.layout.disk else state
    return state, run.evaluated(state)


@pytest.mark.few(name=["AdamW"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_from_files_is_the_update(name, seed, tmp_path):
    stored, plain = (updated(program(OPTIMIZERS[name], folder, MODEL), seed) for folder in (tmp_path, None))
    assert_close(stored, plain, 0 if name in EXACT else 1e-3 if name == "SOAP" else 2e-6)
