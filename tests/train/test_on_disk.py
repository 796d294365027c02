"""Optimizer state in files, updated one layer at a time: the same training, in less memory than the state takes."""

import gc
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from every_optimizer import BY_GROUP, EVERY, RATE

from axon.checkpoint import Checkpoints, Reader, Store
from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.plan.memory import arguments, on_disk
from axon.plan.topology import devices
from axon.runtime import nested
from axon.runtime.stored import StoredArray, is_stored
from axon.train.layer_update import leaves
from axon.train.optimizers import AdamW, Lion
from axon.train.step import Program
from models.gemma import Gemma
from models.llama import Llama

MODEL = Gemma(vocab=64, embed=32, layers=3, heads=2, kv_heads=2, mlp=32, head_dim=8, window=8)
SMALL = Llama(vocab=64, embed=32, layers=2, heads=2, kv_heads=2, mlp=32)

OPTIMIZERS = (
    EVERY
    | BY_GROUP
    | {
        "Lion": Lion(RATE, moments="bfloat16"),
        "8 bits": AdamW(RATE, moments="dynamic8"),
        "FP8": AdamW(RATE, moments="fp8"),
    }
)
EXACT = ("Lion", "SGD", "SGD without momentum")
SPLIT: dict[str, Any] = {"mesh": {"data": 2, "tensor": 2}, "zero": 1}


def program(rule, folder, model: Any = SMALL, host=(), **layout):
    layout = {**SPLIT, **layout}
    count = int(np.prod(list(layout["mesh"].values())))
    execution = Execution(unroll=False, host=host, disk={"optimizer": str(folder)} if folder else {})
    options = {"execution": execution, "devices": jax.devices()[:count]}
    return Program(model, Layout(**layout), rule, batch=4, seq=16, **options)


def fetched(tree):
    """The arrays of a state by place, those in files among them."""
    return {key: x.block((slice(None),) * x.ndim) if is_stored(x) else np.asarray(x) for key, x in leaves(tree).items()}


def assert_equal(found, expected):
    for key, leaf in fetched(found).items():
        np.testing.assert_array_equal(leaf, expected[key], err_msg=key)


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


def updated(run, given, seed, steps=3):
    """The state, and the parameters to evaluate, after updates by random gradients."""

    def step(state, gradients):
        return run.update.step(given(run.runtime), state, gradients)[0]

    def draw(number):
        return {
            path: np.random.default_rng([seed, number, len(path)]).normal(size=spec.shape).astype(np.float32)
            for path, spec in run.parameters.items()
        }

    state, step = run.init(nested(draw(steps))), run.runtime.jit(step)
    for number in range(steps):
        with run.runtime.tracing():
            state = step(state, draw(number))
            state = run.update.finish(state) if run.runtime.execution.disk else state
    return state, run.evaluated(state)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(name=["Muon"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_from_files_is_the_update(name, given, seed, tmp_path):
    model, mesh = (SMALL, {"data": 2}) if name == "AdamW" else (MODEL, SPLIT["mesh"])
    runs = [program(OPTIMIZERS[name], folder, model, mesh=mesh) for folder in (tmp_path, None)]
    stored, plain = (updated(run, given, seed) for run in runs)
    assert_close(stored, plain, 0 if name in EXACT else 1e-3 if name == "SOAP" else 2e-6)


@pytest.mark.full
def test_the_state_is_saved_and_restored_with_files_and_without(rng, tmp_path, monkeypatch):
    here, there = (program(AdamW(RATE), folder) for folder in (tmp_path, None))
    state = here.init()
    stored = {key: leaf for key, leaf in leaves(state.optimizer).items() if leaf.ndim}
    for leaf in stored.values():
        leaf.fill(rng.normal(size=leaf.shape).astype(leaf.dtype))
    before = fetched(state)
    with monkeypatch.context() as patch, Store(tmp_path / "first", Checkpoints()) as store:
        patch.setattr(StoredArray, "block", alone(StoredArray.block))
        store.save(1, state, {}, here.specs)
    for leaf in stored.values():  # the next step's: what was saved is not in them
        leaf.fill(np.zeros(leaf.shape, leaf.dtype))
    elsewhere, _ = Reader(tmp_path / "first").restore(there.abstract_state(), specs=there.specs)
    assert_equal(elsewhere, before)
    with Store(tmp_path / "second", Checkpoints()) as store:
        store.save(1, elsewhere, {}, there.specs)
    for folder in ("first", "second"):
        other = program(AdamW(RATE), tmp_path, mesh={"data": 2}, zero=3)
        restored, _ = Reader(tmp_path / folder).restore(other.abstract_state(), specs=other.specs)
        assert jax.tree.structure(restored) == jax.tree.structure(other.abstract_state())
        assert_equal(restored, before)


def alone(read):
    """`StoredArray.block`, of whose results only the last may still be in memory at the next call, and none before."""
    results = []

    def block(self, where):
        assert sum(result() is not None for result in results) <= 1
        value = read(self, where)
        results.append(weakref.ref(value))
        return value

    return block


@pytest.mark.full
def test_an_update_that_was_killed_costs_nothing(batches, tmp_path, monkeypatch):
    whole = fetched(trained(program(AdamW(RATE), tmp_path), batches))
    run = program(AdamW(RATE), tmp_path)
    state = trained(run, batches[:2])
    with Store(tmp_path / "checkpoints", Checkpoints()) as store:
        store.save(2, state, {})
    with monkeypatch.context() as patch:
        patch.setattr(StoredArray, "write", killed_after(StoredArray.write, 3))
        with pytest.raises(KeyboardInterrupt):
            trained(run, batches[2:], state)
    again = program(AdamW(RATE), tmp_path)
    restored, _ = Reader(tmp_path / "checkpoints").restore(again.abstract_state())
    assert_equal(trained(again, batches[2:], restored), whole)


def killed_after(write, count):
    """`StoredArray.write` that ends the process the time after so many."""
    numbers = iter(range(count))

    def limited(self, *arguments):
        if next(numbers, None) is None:
            raise KeyboardInterrupt
        write(self, *arguments)

    return limited


@pytest.mark.full
def test_a_model_trains_whose_optimizer_state_exceeds_a_limit_on_memory(batches, tmp_path, monkeypatch):
    model = Llama(vocab=64, embed=16, layers=16, heads=2, kv_heads=2, mlp=128)
    mesh = {"mesh": {"data": 1}, "zero": 0}
    # eps: else Adam makes of two roundings of a gradient near zero two different steps
    run, plain = (program(AdamW(RATE, eps=1e-3), folder, model, **mesh) for folder in (tmp_path, None))
    of_state, of_parameters = on_disk(run), sum(spec.nbytes for spec in run.parameters.values())
    limit = 2 * of_parameters + of_state // 3  # parameters, gradients, and a third of the state
    gc.collect()
    before, found = live_bytes(), []

    def measured(work):
        def measure(self, *arguments):
            found.append(live_bytes() - before)
            return work(self, *arguments)

        return measure

    with monkeypatch.context() as patch:
        patch.setattr(StoredArray, "read", measured(StoredArray.read))
        patch.setattr(StoredArray, "write", measured(StoredArray.write))
        state = trained(run, batches)
    assert max(found) < limit
    assert arguments(run)["optimizer"] == 2 * 4  # counts of steps
    expected = trained(plain, batches)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(expected)) + of_parameters > limit
    assert_close(state.parameters, expected.parameters, 1e-4)


def live_bytes():
    """Of all arrays in memory."""
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.full
def test_parameters_may_be_on_the_host_and_the_state_in_files(batches, tmp_path):
    state, plain = (
        trained(program(AdamW(RATE), folder, host=host), batches)
        for folder, host in ((tmp_path, ("params",)), (None, ()))
    )
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.parameters)} == {"pinned_host"}
    assert_close(state, plain, 1e-4)


def test_several_processes_are_refused():
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    options = {"execution": Execution(disk={"optimizer": "/nowhere"}), "devices": devices("v5e:2x4")}
    with pytest.raises(UserError, match="devices are of several processes, whose state cannot be in files yet"):
        Program(SMALL, Layout({"data": 8}), AdamW(RATE), batch=8, seq=16, **options)
