"""Optimizer state on the host, updated one layer at a time: the same training, in less device memory."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from every_optimizer import BY_GROUP, EVERY, RATE

from axon.checkpoint import Checkpoints, Reader, Store
from axon.errors import UserError
from axon.layout import Execution, Layout, Placement
from axon.plan.compiled import device_bytes, host_bytes
from axon.plan.memory import arguments, on_host
from axon.plan.topology import devices
from axon.train.optimizers import AdamW
from axon.train.step import Program
from models.gemma import Gemma
from models.llama import Llama

MODEL = Gemma(vocab=64, embed=32, layers=5, heads=2, kv_heads=2, mlp=32, head_dim=8, window=8)
"""Two periods of two kinds, and a layer of a third."""

SMALL = Llama(vocab=64, embed=32, layers=2, heads=2, kv_heads=2, mlp=32)

OPTIMIZERS = (
    EVERY
    | BY_GROUP
    | {
        "8 bits": AdamW(RATE, moments="dynamic8"),
        "FP8": AdamW(RATE, moments="fp8"),
    }
)
PIPELINE: dict[str, Any] = {"mesh": {"pipe": 2, "data": 2}, "microbatches": 2}
SPLIT: dict[str, Any] = {"mesh": {"data": 2, "tensor": 2}, "zero": 1}


def program(rule, model: Any = MODEL, host=("optimizer",), unroll=False, remat="none", **layout):
    layout = {**SPLIT, **layout}
    count = int(np.prod(list(layout["mesh"].values())))
    options = {"execution": Execution(host=host, unroll=unroll, remat=remat), "devices": jax.devices()[:count]}
    return Program(model, Layout(**layout), rule, batch=4, seq=16, **options)


def assert_close(found, expected, tolerance: float):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(np.abs(other).max(), 1e-6))


KINDS = (("optimizer",), ())
"""With the state on the host, and without."""


@pytest.fixture
def drawn(seed):
    """drawn(shape, number, path): random gradients of a step."""

    def draw(shape, number, path):
        return np.random.default_rng([seed, number, len(path)]).normal(size=shape).astype(np.float32)

    return draw


def updated(program, given, drawn, steps=2):
    """The state, and the parameters to evaluate, after updates by the gradients that `drawn` draws, path → array."""

    def step(state, gradients):
        return program.update.step(given(program.runtime), state, gradients)[0]

    with program.runtime.tracing():
        state, step = program.init(), program.runtime.jit(step)
        for number in range(steps):
            state = step(state, {path: drawn(s.shape, number, path) for path, s in program.parameters.items()})
    return state, program.evaluated(state)


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_streamed_update_is_the_update(name, given, drawn):
    runs = [program(OPTIMIZERS[name], host=host) for host in KINDS]
    streamed, whole = (jax.device_get(updated(run, given, drawn)) for run in runs)
    assert_close(streamed, whole, 1e-3 if name == "SOAP" else 2e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_each_stage_of_a_pipeline_streams_its_own_layers(name, given, drawn):
    model = replace(SMALL, layers=4)
    runs = [program(OPTIMIZERS[name], model, host, **PIPELINE) for host in KINDS]
    streamed, whole = (jax.device_get(updated(run, given, drawn)) for run in runs)
    assert_close(streamed, whole, 2e-6)


@pytest.mark.full
@pytest.mark.parametrize("unroll", [False, True])
def test_parameters_on_the_host_train_and_evaluate_the_same(unroll, rng, packed_batch):
    model = replace(SMALL, tied=True)
    batch = packed_batch(rng, 4, 16, 64)
    found = {}
    for host in (("params", "optimizer"), ()):
        made = program(AdamW(RATE), model, host, unroll, "full", zero=3)
        start = made.init()
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(start.parameters)}
        assert kinds == {"pinned_host" if host else "device"}
        evaluated = made.evaluate(start, made.place(batch))
        found[host] = jax.device_get((made.step(start, made.place(batch)), evaluated))
    assert_close(found["params", "optimizer"], found[()], 2e-6)


@pytest.mark.full
def test_the_state_stays_on_the_host_and_is_saved_for_layouts_that_have_it_elsewhere(rng, packed_batch, tmp_path):
    here, there = (program(AdamW(RATE), SMALL, host=host) for host in (("optimizer",), ()))
    state, _ = here.step(here.init(), here.place(packed_batch(rng, 4, 16, 64)))
    for found, promised in zip(jax.tree.leaves(state), jax.tree.leaves(here.abstract_state()), strict=True):
        assert found.sharding.is_equivalent_to(promised.sharding, found.ndim)
        assert found.sharding.memory_kind == promised.sharding.memory_kind
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.optimizer) if x.ndim} == {"pinned_host"}
    with Store(tmp_path, Checkpoints()) as store:
        store.save(1, state, {})
    for other in (here, there):
        restored, _ = Reader(tmp_path).restore(other.abstract_state())
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(restored.optimizer) if x.ndim}
        assert kinds == {"pinned_host" if other is here else "device"}
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
    with Store(tmp_path, Checkpoints()) as store:
        store.save(2, restored, {})
    back, _ = Reader(tmp_path).restore(here.abstract_state())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))
    here.step(back, here.place(packed_batch(rng, 4, 16, 64)))


def test_layers_that_params_and_optimizer_split_otherwise_are_refused():
    with pytest.raises(UserError, match=r"take 'layers' out of Layout\.optimizer"):
        program(AdamW(RATE), SMALL, **PIPELINE | {"optimizer": {"layers": None}})


def test_a_platform_without_the_hosts_memory_is_refused(monkeypatch):
    monkeypatch.setattr(Placement, "memories", frozenset({"device"}))
    with pytest.raises(UserError, match=r"\(cpu\) have no memory 'pinned_host'"):
        program(AdamW(RATE), SMALL)


def test_a_described_gpu_which_has_no_memories_is_refused():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the CUDA compiler: scripts/setup compilers")
    options = {"execution": Execution(host=("optimizer",)), "devices": devices("h200:8")}
    with pytest.raises(UserError, match="a gpu that is only described do not name their memories"):
        Program(SMALL, Layout({"data": 8}), AdamW(RATE), batch=8, seq=16, **options)


@pytest.mark.full
def test_a_compiled_step_has_one_layer_on_the_device_of_what_is_on_the_host():
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    model = Llama(vocab=512, embed=256, layers=32, heads=2, kv_heads=2, mlp=1024)
    needed, host = {}, {}
    for kinds in ((), ("optimizer",), ("params", "optimizer")):
        options = {"execution": Execution(remat="full", host=kinds), "devices": devices("v5e:2x4")}
        made = Program(model, Layout({"data": 8}, zero=3), AdamW(RATE), batch=8, seq=128, **options)
        compiled = made.lower().compile()
        needed[kinds], host[kinds] = device_bytes(compiled), host_bytes(compiled)
        arguments_of = arguments(made)
    both = on_host(made)
    assert arguments_of["parameters"] == 0
    assert arguments_of["optimizer"] < 64
    assert needed[()] - needed["optimizer",] > 0.8 * (2 / 3 * both)
    assert needed[()] - needed["params", "optimizer"] > 0.8 * both
    assert [host[kinds] / both for kinds in host] == pytest.approx([0, 2 / 3, 1], rel=0.01)
