"""PipeDream-2BW, a pipeline without a flush: each step applies the gradients of the batch before, taken at the weights
that it began with, and nothing else differs from one device."""

import math
import os
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.axes import einsum, shard
from axon.checkpoint import Checkpoints, Store
from axon.layout import Layout, sequence_parallel
from axon.nn import Auxiliary, Depth, Dropout, LanguageModel, Param, RMSNorm, Segment, Variable
from axon.parallel.pipeline import OneFOneB, TwoBW
from axon.plan.memory import arguments
from axon.run.restore import IN_FLIGHT, lost_in_flight, restore_state
from axon.train import objective
from axon.train.objective import NextToken
from axon.train.optimizers import AdamW, Cosine, Group
from axon.train.state import State
from axon.train.step import Program
from axon.train.update import clipped, metrics
from models.llama import Llama

LLAMA = Llama(vocab=61, vocab_multiple=64, embed=32, layers=4, heads=4, kv_heads=2, mlp=48, tied=True)
SEQ, STEPS = 8, 4
OPTIMIZER = AdamW(Cosine(peak=1e-2, warmup=2, steps=STEPS + 3), clip=0.5, weight_decay=0.1, eps=1e-3)


class Mixer(nnx.Module):
    """A block as small as can be, with dropout, an auxiliary loss, and a variable that scales its output."""

    def __init__(self, dims):
        self.mix, self.dropout = Param("embed embed_out", dims), Dropout(0.2, "noise")
        self.seen = Variable("embed", dims, lambda seen, now: 0.5 * seen + 0.01 * now)

    def __call__(self, x, inputs, cache=None):
        h = einsum("batch seq embed, embed embed_out -> batch seq embed_out", x, self.mix)
        y = x + self.dropout(jnp.tanh(h), inputs) * (1 + jnp.tanh(self.seen[...]))
        seen = jax.lax.stop_gradient(jnp.sum(jnp.square(y), (0, 1)))
        return y, cache, Auxiliary({"size": 1e-3 * jnp.sum(jnp.square(y))}, {"seen": seen})


@dataclass(frozen=True)
class Mixers:
    """A model whose step depends on all that a batch in flight has to remember; embedding and head are tied."""

    vocab: int = 32

    def build(self):
        dims = {"vocab": self.vocab, "embed": 8, "embed_out": 8}
        depth = Depth(Segment(2, block=Mixer(dims)))
        return LanguageModel(dims, depth, RMSNorm("embed", dims), tied=True, embedding_stddev=0.2)


def two_bw(mesh: dict[str, int], microbatches: int = 8, **fields: Any) -> Layout:
    return Layout(mesh, microbatches=microbatches, schedule=TwoBW(), **fields)


@dataclass(frozen=True)
class Kept(NextToken):
    """The loss over a share of the tokens that is drawn anew in each step."""

    def draw(self, module, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["weights"].shape)
        return {**batch, "kept": shard(kept * batch["weights"], "batch seq")}

    def counts(self, batch):
        return super().counts(batch) | dict.fromkeys(("next_token", "loss"), jnp.sum(batch["kept"]))

    def sums(self, module, batch, key=None):
        return super().sums(module, {**batch, "weights": batch["kept"]}, key)


def program_of(
    layout: Layout, model: Any, seed: int, optimizer: Any = OPTIMIZER, loss: Any = NextToken(0.1)
) -> Program:
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    sequences = 2 * layout.microbatches
    options = {"batch": sequences, "seq": SEQ, "seed": seed, "objective": loss}
    return Program(model, layout, optimizer, devices=devices, **options)


def delayed(program: Program, state: State, batches: list[Any]):
    """State and metrics after each step but the first, of training by gradients that come one step late."""

    def step(state, began, batch):
        batch = {**batch, objective.SEQUENCES: jnp.arange(program.batch, dtype=jnp.int32)}
        counts = program.gradients.counts(batch)
        frozen = program.update.frozen
        found, sums = program.gradients(began, batch, counts, frozen)
        found, norms = clipped(found, program.optimizer.clip)
        after = program.update.applied(state, found)
        reported = metrics(program.update.rate(state), sums, counts, norms)
        return replace(after, variables=variables(state, sums.statistics)), reported

    def variables(state, statistics):
        if not statistics:
            return state.variables
        (path,) = statistics
        now = state.variables["layers"]["block"]["seen"]
        return {"layers": {"block": {"seen": program.runtime.variables[path].update(now, statistics[path])}}}

    shardings = jax.tree.map(lambda a: a.sharding, program.abstract_state())
    began = jax.device_put([state, replace(state, step=state.step + 1)], [shardings] * 2)  # the first step: no update
    compiled, found, state = program.runtime.jit(step), [], began[1]
    for number, batch in enumerate(batches[:-1]):
        with program.runtime.tracing():
            state, reported = compiled(state, began[number], program.place(batch))
        began.append(state)
        found.append(jax.device_get((state, reported)))
    return found


@dataclass(frozen=True)
class Trained:
    """A program, its batches, and state and metrics after each step, the initial state first."""

    program: Program
    batches: list[Any]
    states: list[Any]
    metrics: list[Any]
    one: Program

    @property
    def start(self) -> State:
        """The initial state, without what is in flight."""
        return replace(self.states[0], in_flight={})


def train(layout: Layout, model: Any, packed_batch, optimizer: Any = OPTIMIZER) -> Trained:
    seed = int(os.environ["AXON_TEST_SEED"])
    program = program_of(layout, model, seed, optimizer)
    rows = {name: row for name, row in layout.rows.items() if name == "embed_out"}
    plain = Layout({"data": 1}, microbatches=layout.microbatches, rows=rows)
    one = program_of(plain, model, seed, optimizer)
    rng = np.random.default_rng(seed)
    batches = [packed_batch(rng, program.batch, SEQ, model.vocab) for _ in range(STEPS)]
    batches[1]["weights"][: len(batches[1]["weights"]) // 2] = 0  # far fewer tokens than in the others
    state = program.init()
    states, found = [jax.device_get(state)], []
    for batch in batches:
        state, reported = program.step(state, program.place(batch))
        states.append(jax.device_get(state))
        found.append(jax.device_get(reported))
    return Trained(program, batches, states, found, one)


def compare(trained: Trained) -> None:
    start = jax.tree.map(lambda s, x: x[tuple(map(slice, s.shape))], trained.one.specs, trained.start)
    for after, (state, reported) in enumerate(delayed(trained.one, start, trained.batches), 2):
        ours = trained.states[after]
        assert ours.step == after
        for name, value in reported.items():
            np.testing.assert_allclose(trained.metrics[after - 1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        for part in ("parameters", "variables"):
            close(getattr(ours, part), getattr(state, part), atol=3e-6)
        assert (moved := norm(ours.parameters, trained.states[after - 1].parameters)) > 1e-3, moved


def close(ours: Any, others: Any, **tolerance: Any) -> None:
    """But for identity layers of ours."""

    def of_leaf(one: Any, other: Any) -> None:
        np.testing.assert_allclose(one[tuple(map(slice, other.shape))], other, **tolerance)

    jax.tree.map(of_leaf, ours, others)


def norm(ours: Any, others: Any) -> float:
    return math.sqrt(sum(jax.tree.leaves(jax.tree.map(lambda a, b: np.sum((a - b) ** 2), ours, others))))


def same(ours: Any, others: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, ours, others)


@pytest.fixture(scope="module")
def noisy(packed_batch) -> Trained:
    return train(two_bw({"pipe": 2}, microbatches=3, rows={"embed_out": None}), Mixers(), packed_batch)


def test_each_step_applies_the_gradients_of_the_batch_before_at_the_weights_it_began_with(noisy):
    compare(noisy)


def test_the_first_step_finishes_nothing_and_changes_nothing(noisy):
    before, after = noisy.states[:2]
    for part in ("parameters", "optimizer", "variables"):
        same(getattr(after, part), getattr(before, part))
    assert all(np.all(value == 0) for value in noisy.metrics[0].values())
    assert (int(before.in_flight.pending), int(after.in_flight.pending)) == (0, 1)


@pytest.mark.full
def test_what_an_objective_drew_of_a_batch_is_in_flight_with_it(packed_batch, rng):
    layout = two_bw({"pipe": 2, "data": 2}, microbatches=3, rows={"embed_out": None})
    plain = Layout({"data": 1}, microbatches=3, rows={"embed_out": None})
    late, one = (program_of(each, Mixers(), 5, loss=Kept()) for each in (layout, plain))
    batches = [packed_batch(rng, late.batch, SEQ, Mixers().vocab) for _ in range(2)]
    state = late.init()
    for batch in batches:
        state, reported = late.step(state, late.place(batch))
    _, expected = one.step(one.init(), one.place(batches[0]))
    for name in ("loss", "tokens", "size", "grad_norm"):
        np.testing.assert_allclose(reported[name], expected[name], rtol=1e-5, err_msg=name)


def saved(folder, state: Any, program: Program) -> Store:
    store = Store(folder, Checkpoints(asynchronous=False))
    store.save(int(state.step), state, {IN_FLIGHT: program.in_flight}, program.specs)
    return store


def test_a_run_that_is_stopped_goes_on_with_the_batch_in_flight_bit_for_bit(noisy, tmp_path):
    program = noisy.program
    with saved(tmp_path, noisy.states[2], program) as store:
        state, extra = restore_state(store, program)
    assert lost_in_flight(extra, program) is None
    for batch, expected in zip(noisy.batches[2:], noisy.states[3:], strict=True):
        state, _ = program.step(state, program.place(batch))
        same(jax.device_get(state), expected)


@pytest.mark.full
def test_the_batch_in_flight_is_finished_on_other_devices_too(noisy, tmp_path):
    layout = noisy.program.runtime.layout
    other = program_of(replace(layout, mesh={"pipe": 2, "data": 2}, zero=3), Mixers(), noisy.program.seed)
    with saved(tmp_path, noisy.states[2], noisy.program) as store:
        state, extra = restore_state(store, other)
    assert lost_in_flight(extra, other) is None
    for batch, expected in zip(noisy.batches[2:], noisy.states[3:], strict=True):
        state, _ = other.step(state, other.place(batch))
        close(jax.device_get(state.parameters), expected.parameters, atol=3e-6)


def test_another_schedule_goes_on_without_the_batch_in_flight_and_back(noisy, tmp_path):
    program, state = noisy.program, noisy.states[2]
    layout = replace(program.runtime.layout, schedule=OneFOneB())
    plain = program_of(layout, Mixers(), 0)
    with saved(tmp_path / "there", state, program) as store:
        there, extra = restore_state(store, plain)
    assert lost_in_flight(extra, plain) == (
        "the batch in flight is lost: it is of another schedule, dtype, or number of stages, microbatches or tokens"
    )
    with saved(tmp_path / "back", there, plain) as store:
        back, extra = restore_state(store, program)
    assert str(lost_in_flight(extra, program)).startswith("nothing is in flight in this checkpoint")
    again, _ = program.step(back, program.place(noisy.batches[2]))
    for part in ("parameters", "optimizer", "variables"):
        same(jax.device_get(getattr(again, part)), getattr(state, part))
    assert int(again.step) == 3
    _, reported = program.step(again, program.place(noisy.batches[3]))
    assert reported["loss"] > 0
    np.testing.assert_allclose(reported["learning_rate"], OPTIMIZER.schedule.function()(1))  # one update was made


@pytest.mark.full
def test_evaluation_is_of_the_latest_parameters(noisy):
    found = []
    for program in (noisy.program, noisy.one):
        abstract = program.abstract_state()
        shardings = jax.tree.map(lambda a: a.sharding, (abstract.parameters, abstract.variables))
        values, variables = jax.device_put((noisy.states[-1].parameters, noisy.states[-1].variables), shardings)
        found.append(jax.device_get(program.evaluator(values, program.place(noisy.batches[0]), variables)))
    close(*found, rtol=1e-5)


def test_the_memory_of_two_versions_is_counted(noisy):
    found = arguments(noisy.program)
    assert found["in flight"] > 2 * found["parameters"]  # weights, and sums of gradients
    made = sum(leaf.nbytes for leaf in jax.tree.leaves(noisy.states[0].in_flight.memory)) // 2
    assert found["in flight"] > 2 * found["parameters"] + made


def test_it_says_what_it_changes(noisy):
    assert "gradients come one step late" in noisy.program.choices["pipeline"]


LAYOUTS = {
    "2 stages": two_bw({"pipe": 2}),
    "4 stages": two_bw({"pipe": 4}),
    "ZeRO-1": two_bw({"pipe": 2, "data": 2}, zero=1),
    "ZeRO-3": two_bw({"pipe": 2, "data": 2}, zero=3),
    "tensor": two_bw({"pipe": 2, "tensor": 2}),
    "sequence and ZeRO-2": two_bw({"pipe": 2, "data": 2, "tensor": 2}, zero=2, rows=sequence_parallel()),
    "padded": two_bw({"pipe": 3}, pad_layers=True, rows={"vocab": None}),
}


@pytest.mark.full
@pytest.mark.some(name=("ZeRO-3",))
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_goes_together_with_what_else_splits_arrays(name, packed_batch):
    compare(train(LAYOUTS[name], LLAMA, packed_batch))


@pytest.mark.full
def test_frozen_parameters_stay_and_are_kept_once(packed_batch):
    groups = (Group("*/attention/*", frozen=True), Group("embedding/*", frozen=True))
    trained = train(two_bw({"pipe": 2}), LLAMA, packed_batch, replace(OPTIMIZER, groups=groups))
    compare(trained)
    assert "embedding" not in trained.states[-1].in_flight.parameters
    assert "attention" not in trained.states[-1].in_flight.parameters["layers"]["block"]
