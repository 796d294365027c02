"""Batches of answers that the model samples: what is in them, by which weights, and after a resume the same."""

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import likes
import numpy as np
import pytest

from axon.checkpoint import Reader
from axon.config import dump, load
from axon.data import FeedContext, JsonLines
from axon.errors import Unavailable, UserError
from axon.layout import Execution, Layout
from axon.parallel.pipeline.schedules import OneFOneB
from axon.run import program
from axon.serve import Answer, Capacity, Engine, Finish, Request, Sampling, answers
from axon.tune import AllAnswers, BestAndWorst, BestAnswers, Rollouts, Samplers, packing
from axon.tune.episodes import Episode
from axon.tune.judge import Scores
from axon.tune.policy_engine import PolicyEngine
from axon.tune.policy_sampler import Noise
from axon.tune.prompt import Prompt
from axon.tune.rollout import Rollout
from axon.tune.sampler_setup import SamplerSetup

CONFIGS = Path(__file__).parents[2] / "configs"
WORDS = ("alpha beta", "gamma", "delta epsilon", "zeta eta theta", "iota")


def file_of(folder, *texts):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return JsonLines(str(path))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return file_of(tmp_path_factory.mktemp("prompts"), *WORDS)


@pytest.fixture(scope="module")
def rolling(tiny, prompts):
    """A run on its own answers."""
    sampling = Sampling(tokens=5, temperature=1.0)
    best = {"samples": 3, "selection": BestAnswers(2), "sampling": sampling}
    data = Rollouts(tiny.data, {"short": likes.short}, prompts=(prompts,), **best)
    return replace(tiny, data=data, steps=4, evaluation=None)


@pytest.fixture(scope="module")
def prepared(rolling, caches):
    return rolling.data.prepare(silent)


def silent(line):
    pass


SPLIT = Layout({"data": 2}, zero=3)


def stored(ran, few):
    """The last checkpoint's parameters and optimizer state, by path."""
    with few(ran.train.layout.mesh["data"]):
        abstract = program(ran.train).abstract_state()
    parts = {"parameters": abstract.parameters, "optimizer": abstract.optimizer}
    return jax.tree.leaves_with_path(Reader(ran.folder / "checkpoints").restore_parts(parts))


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_was_stopped_and_continued_is_bit_identical(devices, staleness, rolling, do, few, tmp_path):
    rolling = replace(
        rolling,
        data=replace(rolling.data, staleness=staleness),
        layout=Layout({"data": devices}, zero=3 if devices > 1 else 0),
    )
    whole = do(rolling, tmp_path / "whole", devices)
    do(rolling, tmp_path / "stopped", devices, steps=2)
    ran = do(rolling, tmp_path / "stopped", devices)
    names = ("loss", "grad_norm", "tokens", "reward", "rollout_trained", "rollout_tokens")
    assert ran.records(*names) == whole.records(*names)
    stale = [[step, float(min(step - 1, staleness))] for step in range(1, 5)]
    assert ran.records("rollout_staleness") == whole.records("rollout_staleness") == stale
    assert len({reward for _, reward in whole.records("reward")}) > 1
    for (path, one), (_, other) in zip(stored(ran, few), stored(whole, few), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))


@pytest.mark.full
@pytest.mark.parametrize(
    "change",
    [
        {"layout": SPLIT},
        {"layout": Layout({"data": 2})},
        {"layout": Layout({"tensor": 2})},
        {"layout": Layout({"context": 2})},
        {"layout": Layout({"pipe": 2}, schedule=OneFOneB(), microbatches=2)},
        {"layout": Layout({"data": 2}), "execution": Execution(host=("params", "optimizer"))},
    ],
    ids=("zero", "data", "tensor", "context", "pipe", "host"),
)
def test_every_layout_writes_and_trains_alike(change, rolling, do, tmp_path):
    rolling = replace(rolling, model=replace(rolling.model, layers=2), steps=3)
    names = ("loss", "grad_norm", "reward", "rollout_tokens")
    expected = do(rolling, tmp_path / "one").records(*names)
    found = do(replace(rolling, **change), tmp_path / "split", devices=2).records(*names)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_its_file_is_the_same_tree(rolling, tmp_path):
    file = tmp_path / "run.gin"
    file.write_text(dump(rolling))
    assert load(file).tree == rolling


@pytest.fixture(scope="module")
def one(rolling, few):
    """The run's program on one device."""
    with few(1):
        return program(rolling)


def test_each_batch_is_of_the_weights_that_it_is_drawn_with(one, prepared, begun, rng):
    """Of two states in turn, the batch's answers are those of an engine that never had other weights."""
    states, config = [begun(one, rng) for _ in range(2)], prepared.config
    with prepared.feed(FeedContext(7, one.runtime, start=3)) as feed:
        drawn = [feed.draw(state) for state in states]
    for number, (batch, state) in enumerate(zip(drawn, states, strict=True), 3):
        with prepared.feed(FeedContext(7, one.runtime, start=number)) as feed:
            for name, array in feed.draw(state).items():
                np.testing.assert_array_equal(array, batch[name], err_msg=name)
        texts = [prompt.text for prompt in prepared.drawn(7, number)]
        for row, (tokens, weights) in enumerate(zip(batch["tokens"], batch["weights"], strict=True)):
            before = tokens[: np.flatnonzero(weights)[0] + 1]
            assert prepared.tokenizer.visible(before) == texts[row // config.of_prompt]
    with prepared.feed(FeedContext(7, one.runtime, start=3)) as feed:
        assert any((feed.draw(states[1])[name] != drawn[0][name]).any() for name in drawn[0])


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(("staleness", "redraws"), [(1, 0), (2, 0), (1, 1)])
def test_a_stale_batch_is_that_of_the_weights_so_many_steps_before(staleness, redraws, one, prepared, begun, rng):
    """Also after its feed was saved, as JSON, and opened again, with its own sequences alone."""
    states = [replace(begun(one, rng), step=jnp.int32(step)) for step in range(4)]
    fresh = replace(prepared, config=replace(prepared.config, redraws=redraws))
    stale = replace(fresh, config=replace(fresh.config, staleness=staleness))
    saved, context, mine = {}, FeedContext(7, one.runtime), np.array([1, 4, 5])
    for number, state in enumerate(states):
        again = replace(context, start=number, saved=json.loads(json.dumps(saved)), sequences=mine)
        with stale.feed(again) as feed:
            batch, metrics = feed.draw(state), feed.metrics
            saved = feed.saved()
        sampled = max(number - staleness, 0)
        with fresh.feed(replace(context, start=number)) as feed:
            expected = feed.draw(states[sampled])
            assert feed.saved() == {}
            assert metrics == {**feed.metrics, "rollout_staleness": number - sampled}
        for name, array in expected.items():
            np.testing.assert_array_equal(batch[name], array[mine], err_msg=name)


@pytest.mark.full
@pytest.mark.draws(1)
def test_batches_that_waited_and_are_left_out_since_are_not_trained_on(one, prepared, begun, rng):
    state = begun(one, rng)
    stale = replace(prepared, config=replace(prepared.config, staleness=1))
    with stale.feed(FeedContext(7, one.runtime)) as feed:
        feed.draw(state)
        saved = feed.saved()
    lines = []
    context = FeedContext(7, one.runtime, start=1, left_out=(1,), saved=saved, report=lines.append)
    with stale.feed(context) as feed:
        batch = feed.draw(state)
    assert any("waited in the checkpoint (1 batches" in line and "sampled anew" in line for line in lines)
    with prepared.feed(FeedContext(7, one.runtime, start=2)) as feed:
        for name, array in feed.draw(state).items():
            np.testing.assert_array_equal(batch[name], array, err_msg=name)


def test_rewards_of_a_later_batch_are_asked_while_this_one_is_trained_on(one, prepared, begun, rng):
    """The first batch is there though the rewards of the second wait for it."""
    trained = threading.Event()

    def waits(sampled):
        return sampled.where in first or trained.wait(20)

    first = {prompt.where for prompt in prepared.drawn(7, 0)}
    config = replace(prepared.config, rewards={"waits": waits}, staleness=1, limit=30.0)
    with replace(prepared, config=config).feed(FeedContext(7, one.runtime)) as feed:
        feed.draw(begun(one, rng))
        assert not trained.is_set()
        trained.set()
        assert feed.saved()["pending"][0]["metrics"]["reward"] == 1


def test_a_checkpoint_is_without_batches_whose_rewards_cannot_be_had(one, prepared, begun, rng, monkeypatch):
    """The step that trains on the first of them ends the run."""
    state, config = begun(one, rng), replace(prepared.config, rewards={"judge": likes.judged}, staleness=2)
    monkeypatch.setattr(likes, "LEFT", [12])  # the first batch's answers, of which 8 are trained on
    with replace(prepared, config=config).feed(FeedContext(7, one.runtime)) as feed:
        feed.draw(state)
        assert feed.saved() == {}
        with pytest.raises(Unavailable, match="the judge does not answer"):
            feed.draw(state)
        assert feed.saved() == {}


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_process_is_given_its_own_sequences_and_left_out_batches_are_not_drawn(one, prepared, begun, rng):
    state, mine = begun(one, rng), np.array([1, 4, 5])
    with prepared.feed(FeedContext(7, one.runtime, start=2)) as feed:
        whole = feed.draw(state)
    with prepared.feed(FeedContext(7, one.runtime, start=1, sequences=mine, left_out=(0,))) as feed:
        part = feed.draw(state)
    for name, array in whole.items():
        np.testing.assert_array_equal(part[name], array[mine], err_msg=name)


def test_an_engine_on_the_layout_of_training_has_the_same_arrays(one, prepared, begun, rng):
    engine, state = PolicyEngine(one.runtime, None, prepared.tokenizer, Capacity(2, length=16)), begun(one, rng)
    ((parameters, _),) = engine.weights(state)
    assert all(a is b for a, b in zip(jax.tree.leaves(parameters), jax.tree.leaves(state.parameters), strict=True))


@pytest.mark.full
def test_between_two_batches_there_are_no_keys_and_values(one, prepared, begun, rng):
    """The memory of what sampled is given back: nothing but the state is on the devices while a step runs."""
    state, sizes = begun(one, rng), []
    before = {id(array) for array in jax.live_arrays()}
    with prepared.feed(FeedContext(7, one.runtime)) as feed:
        for _ in range(2):
            feed.draw(state)
            sizes.append(max(array.nbytes for array in jax.live_arrays() if id(array) not in before))
        (engine,) = feed._sampler._player.engine._engines
    engine._runner.warm_up()  # which needs them again
    pages = max(array.nbytes for array in jax.live_arrays() if id(array) not in before)
    assert max(sizes) < pages / 10


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout({"data": 1}, microbatches=2), "microbatches = 2: of training alone"),
        (Layout({"data": 1}, rows={"headz": None}), "no axis 'headz'.*'heads'"),
        (Layout({"tensor": 3}), "tensor 3 = 3 devices"),
    ],
    ids=["training", "row", "devices"],
)
def test_a_layout_that_does_not_serve_is_refused_by_field(layout, said, one, rolling):
    with pytest.raises(UserError, match=rf"^Rollouts\.layout: .*{said}"):
        replace(rolling.data, layout=layout).check_runtime(one.runtime)


def test_a_layout_of_samplers_is_checked_on_devices_that_are_not_there(one, rolling):
    """Which infer -1 themselves."""
    for mesh in ({"tensor": 2}, {"data": 64, "tensor": -1}):
        replace(rolling.data, layout=Layout(mesh), samplers=Samplers()).check_runtime(one.runtime)
    wide = replace(rolling.data, layout=Layout({"tensor": 3}), samplers=Samplers())
    with pytest.raises(UserError, match=r"^Rollouts\.layout: .*mesh axis 'tensor'"):
        wide.check_runtime(one.runtime)


def test_a_layout_with_what_is_left_is_told_by_the_devices_of_who_samples(one, prepared, few, tmp_path):
    for mesh, said in (({"tensor": -1}, "not divisible by 3"), ({"data": 2, "tensor": -1}, "3 devices are not divis")):
        setup = SamplerSetup.of(tmp_path, one.runtime, Layout(mesh), prepared.tokenizer, Capacity(2, length=16), None)
        with few(3), pytest.raises(UserError, match=rf"^Rollouts\.layout .*the 3 devices of a process that .*{said}"):
            setup.sampler()


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_layout_that_cannot_shard_what_is_sampled_costs_no_stage(do, tmp_path):
    train = load(CONFIGS / "tune" / "quickstart_grpo.gin").tree
    data = replace(train.data, layout=Layout({"tensor": 2}))
    with pytest.raises(UserError, match=r"^Rollouts\.layout: .*'tensor'"):
        do(replace(train, data=data, layout=Layout({"data": 2})), tmp_path / "run", devices=2)
    assert not (tmp_path / "run").exists()


def test_engines_that_share_the_requests_have_the_same_arrays(rolling, prepared, few, begun, rng):
    with few(2):
        made = program(replace(rolling, layout=Layout({"data": 2})))
    state, tokenizer = begun(made, rng), prepared.tokenizer
    engine, own = PolicyEngine(made.runtime, None, tokenizer, Capacity(2, length=16)), state.parameters
    for number, (parameters, _) in enumerate(engine.weights(state)):
        for copy, array in zip(jax.tree.leaves(parameters), jax.tree.leaves(own), strict=True):
            assert copy.devices() == {jax.devices()[number]}
            shard = array.addressable_shards[number].data
            assert copy.addressable_shards[0].data.unsafe_buffer_pointer() == shard.unsafe_buffer_pointer()
    assert len(engine.weights(state)) == 2


@pytest.mark.full
@pytest.mark.draws(1)
def test_weights_are_moved_to_another_layout_and_answer_as_before(rolling, prepared, few, begun, rng):
    requests = [Request(prompt.ids, Sampling(6, temperature=0)) for prompt in prepared.prompts]
    capacity, serving = Capacity(4, length=32), Layout({"tensor": 2})
    with few(2):
        made = program(replace(rolling, layout=SPLIT))
    state = begun(made, rng)
    engine = PolicyEngine(made.runtime, serving, prepared.tokenizer, capacity)
    own = Engine(made.runtime, state.parameters, state.variables, tokenizer=prepared.tokenizer, capacity=capacity)
    assert [one.ids for one in engine.answers(state, requests)] == [one.ids for one in answers(own, requests)]
    gate = engine.weights(state)[0][0]["layers"]["block"]["mlp"]["gate"]
    assert dict(gate.sharding.mesh.shape)["tensor"] == 2
    assert gate.addressable_shards[0].data.shape[-1] == gate.shape[-1] // 2


@pytest.mark.parametrize("layout", [Layout({"tensor": 2}), None], ids=["moved", "split"])
def test_answers_are_carried_out_as_the_run_says_but_for_what_waits_on_the_host(layout, rolling, prepared, few):
    execution = Execution(host=("params",), kernels={"attention": "reference"})
    with few(2):
        made = program(replace(rolling, layout=Layout({"data": 2}), execution=execution))
    engine = PolicyEngine(made.runtime, layout, prepared.tokenizer, Capacity(4, length=32))
    assert {one.execution.kernels["attention"] for one in (engine.runtime, *engine.runtimes)} == {"reference"}
    assert not engine.runtime.execution.host


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("layout", [Layout({"tensor": 2}), Layout({"data": 2})], ids=["moved", "split"])
def test_weights_that_were_moved_are_given_back_with_the_pages(layout, rolling, prepared, few, begun, rng):
    """Those that train are not, and answer again."""
    requests = [Request(prompt.ids, Sampling(6, temperature=0)) for prompt in prepared.prompts]
    with few(2):
        made = program(replace(rolling, layout=Layout({"data": 2})))
    state = begun(made, rng)
    engine = PolicyEngine(made.runtime, layout, prepared.tokenizer, Capacity(4, length=32))
    answered, before = [], {id(array) for array in jax.live_arrays()}
    for _ in range(2):
        answered.append([one.ids for one in engine.answers(state, requests)])
        engine.release()
        left = sum(array.nbytes for array in jax.live_arrays() if id(array) not in before)
        assert left < sum(array.nbytes for array in jax.tree.leaves(state.parameters)) / 10
    assert answered[0] == answered[1]


@pytest.mark.full
def test_the_optimizers_state_waits_on_the_host_while_answers_are_sampled(rolling, prepared, few, seed, begun):
    """And what is learned is the same bits as of one on the devices."""
    learned = {}
    for host in ((), ("optimizer",)):
        with few(2):
            made = program(replace(rolling, layout=SPLIT, execution=Execution(host=host)))
        state = begun(made, np.random.default_rng(seed))
        with prepared.feed(FeedContext(7, made.runtime)) as feed:
            for _ in range(3):
                kinds = {array.sharding.memory_kind for array in jax.tree.leaves(state.optimizer) if array.ndim}
                assert kinds == {"pinned_host" if host else "device"}
                state, metrics = made.step(state, made.place(feed.draw(state)))
        learned[host] = jax.device_get((state, metrics))
    jax.tree.map(np.testing.assert_array_equal, *learned.values())


@pytest.mark.full
def test_weights_in_the_hosts_memory_answer_as_those_on_the_device(rolling, one, prepared, few, begun, rng):
    requests = [Request(prompt.ids, Sampling(6, temperature=0)) for prompt in prepared.prompts]
    with few(2):
        made = program(replace(rolling, execution=Execution(host=("params",)), layout=Layout({"data": 2})))
    state, capacity = begun(made, rng), Capacity(4, length=32)
    found = PolicyEngine(made.runtime, None, prepared.tokenizer, capacity).answers(state, requests)
    on_one = PolicyEngine(one.runtime, None, prepared.tokenizer, capacity)
    expected = on_one.answers(replace(state, parameters=jax.device_get(state.parameters)), requests)
    assert [each.ids for each in found] == [each.ids for each in expected]


def test_no_two_answers_have_the_same_noise(rolling):
    noise = Noise(rolling.data.sampling, 7)
    seeds = [noise(*place).seed for place in itertools.product(range(4), range(4), range(3), range(3))]
    assert len(set(seeds)) == len(seeds) == 144


def rollout_of(answers, rewards):
    """Each prompt's answers in a row."""
    prompts = [Prompt("file", "", (5, 6, 7)) for _ in rewards]
    total = np.ravel(rewards)
    written = [Episode.of_answer(Answer(ids, "", Finish.STOP)) for ids in answers]
    return Rollout(prompts, written, Scores({"good": total}, total))


def test_a_sequence_is_a_prompt_with_its_answer_and_weights_are_on_the_answer_alone():
    rollout = rollout_of([(8, 9), (8,)], [[0.0, 1.0]])
    batch = packing.batch_of([[rollout.example((0,))], []], 6, "documents")
    expected = {
        "tokens": [5, 6, 7, 8, 0, 0],
        "targets": [6, 7, 8, 9, 0, 0],
        "positions": [0, 1, 2, 3, 0, 0],
        "documents": [0, 0, 0, 0, -1, -1],
        "weights": [0, 0, 1, 1, 0, 0],
    }
    for name, row in expected.items():
        assert batch[name].tolist() == [row, [-1 if name == "documents" else 0] * 6], name


def test_the_best_are_kept_the_earlier_of_equals_and_none_that_failed_or_is_not_above():
    rewards = np.array([1.0, 3.0, np.nan, 3.0, -1.0])
    assert BestAnswers(3).places(rewards) == [(1,), (3,), (0,)]
    assert BestAnswers(3, above=1.0).places(rewards) == [(1,), (3,), ()]


def test_metrics_are_of_the_answers_that_have_a_reward():
    metrics = rollout_of([(8, 9), (8,), (1,), (1, 2, 3)], [[1.0, 4.0], [2.0, 2.0]]).metrics
    assert metrics["reward"] == metrics["reward_good"] == 2.25
    assert metrics["reward_std"] == pytest.approx(np.std([1, 4, 2, 2]))
    assert metrics["rollout_uniform"] == 0.5
    assert metrics["rollout_tokens"] == 7 / 4
    failed = rollout_of([(8,), (8,)], [[np.nan, 3.0]]).metrics
    assert (failed["reward"], failed["reward_failed"]) == (3.0, 1)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(("rewards", "kept"), [(likes.never, 0), (likes.short, 1)])
def test_answers_that_are_not_above_leave_padding(rewards, kept, one, prepared, begun, rng):
    above = 0 if rewards is likes.never else -np.inf
    config = replace(prepared.config, rewards={"mine": rewards}, selection=BestAnswers(2, above))
    with replace(prepared, config=config).feed(FeedContext(7, one.runtime)) as feed:
        batch = feed.draw(begun(one, rng))
        assert feed.metrics["rollout_trained"] == kept
    assert (batch["weights"].sum(axis=1) > 0).all() == (batch["documents"][:, 0] == 0).all() == bool(kept)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rewards": {"mine": likes.no_arguments}}, ("Rollouts.rewards['mine']", "likes.py", "reward(sampled)")),
        ({"selection": AllAnswers()}, ("Data.batch is 8", "3 sequences", "AllAnswers", "Data.batch to 9")),
        ({"selection": BestAnswers(3)}, ("Data.batch is 8", "3 sequences", "BestAnswers", "Data.batch to 9")),
        ({"samples": 1}, ("BestAnswers.count is 2", "Rollouts.samples to at least 2")),
        ({"samples": 1, "selection": BestAndWorst()}, ("Rollouts.samples is 1", "BestAndWorst", "at least 2")),
        ({"sampling": Sampling(temperature=0)}, ("Sampling.temperature is 0", "Rollouts.samples to 1")),
        ({"prompts": ()}, ("Rollouts.prompts",)),
        ({"prompts": ("prompts.txt",)}, ("Rollouts.prompts", "'prompts.txt'", "source")),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_told_by_field_and_remedy(change, said, rolling):
    with pytest.raises(UserError) as error:
        replace(rolling.data, **change)
    assert all(part in str(error.value) for part in said), error.value


def test_a_prompt_that_leaves_no_room_for_its_answer_is_named(rolling, caches, tmp_path):
    longer = file_of(tmp_path, "alpha", "beta " * 200)
    with pytest.raises(UserError) as error:
        replace(rolling.data, prompts=(longer,)).prepare(silent)
    message = str(error.value)
    assert "document 1 of prompts" in message
    assert "Data.seq + 1, which is 33" in message
    assert "Set Data.seq to at least" in message
    with pytest.raises(UserError, match="has no documents"):
        replace(rolling.data, prompts=(file_of(tmp_path),)).prepare(silent)


def test_an_objective_that_needs_other_arrays_is_refused_by_name(one, prepared):
    one.evaluator.check_arrays(prepared.arrays)
    with pytest.raises(UserError, match=r"NextToken needs the array 'weights' .* Train\.data"):
        one.evaluator.check_arrays({name: axes for name, axes in prepared.arrays.items() if name != "weights"})
    with pytest.raises(UserError, match="NextToken has no use for rewards"):
        one.evaluator.check_arrays(prepared.arrays | {"rewards": "batch"})
    with pytest.raises(UserError, match=r"'targets' of a batch, as 'batch seq', .* as 'batch'"):
        one.evaluator.check_arrays(prepared.arrays | {"targets": "batch"})
