"""Partial rollouts: episodes that several steps sample are those of their weights, token by token."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from worlds import Counting, Fickle

from axon.data import FeedContext
from axon.errors import UserError
from axon.run import program
from axon.serve import Sampling
from axon.train.objective import NextToken
from axon.train.policy_gradient import GRPO
from axon.train.ppo import PPO
from axon.tune import ActorCritic, Rollouts, Samplers

TOKENS, PART = 9, 4
WORLDS = {"answers": None, "episodes": Counting(rounds=3)}


def variety(sampled):
    """Depends on all that a reward is given of an answer."""
    return len(set(sampled.ids)) + 0.01 * (len(sampled.answer) % 7) + 0.1 * sampled.ended


@pytest.fixture(scope="module")
def learning(tiny, prompts, caches):
    """A run that learns from rewards, two steps off; a third of the tokens end an answer."""
    sampling = Sampling(tokens=TOKENS, temperature=1.0, stop_ids=tuple(range(0, 320, 9)))
    text, rewards = replace(tiny.data, seq=48), {"variety": variety}
    data = Rollouts(text, rewards, prompts=(prompts,), staleness=2, partial=PART, sampling=sampling)
    return replace(tiny, data=data, objective=GRPO(), steps=6, evaluation=None)


@pytest.fixture(scope="module")
def made(learning, few):
    with few(1):
        return program(learning)


def drawn(made, data, states, folder=None):
    """Batches and their metrics, one for each state."""
    context = FeedContext(7, made.runtime, objective=GRPO(), report=print, folder=folder)
    with data.prepare(lambda line: None).feed(context) as feed:
        return [(feed.draw(state), dict(feed.metrics)) for state in states]


@pytest.fixture
def states(made, begun, rng):
    return [replace(begun(made, rng), step=np.int32(step)) for step in range(4)]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("world", WORLDS)
def test_where_a_part_is_a_whole_answer_batches_are_those_of_stale_rollouts(world, made, learning, states):
    whole, plain = (replace(learning.data, partial=partial, environment=WORLDS[world]) for partial in (99, 0))
    for (batch, metrics), (other, others) in zip(drawn(made, whole, states), drawn(made, plain, states), strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name], err_msg=name)
        assert metrics.pop("rollout_parts") == 1
        assert metrics == others


def log_probabilities(made, state, batch):
    """Of each target of a batch by a state's weights."""

    def found(parameters, variables, batch):
        module = made.runtime.bind(parameters, variables)
        logits = module.output.logits(module.hidden(NextToken().inputs(batch))[0])
        return jax.nn.log_softmax(logits)

    with made.runtime.tracing():
        values = made.runtime.jit(found)(state.parameters, state.variables, made.place(batch))
    return np.take_along_axis(np.asarray(values), batch["targets"][..., None], -1)[..., 0]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("world", WORLDS)
def test_each_token_has_the_log_probability_of_the_weights_of_its_step(world, made, learning, states):
    """Batch `k` begins with the first state that sees it; the step that trains on it samples the rest of it."""
    several, data = 0, replace(learning.data, environment=WORLDS[world])
    for step, (batch, metrics) in enumerate(drawn(made, data, states)):
        by_step = [log_probabilities(made, state, batch) for state in states]
        ages = []
        for row, weights in enumerate(batch["weights"]):
            places = np.flatnonzero(weights)
            first = max(step - 2, 0)
            versions = [min(first + number // PART, step) for number in range(len(places))]
            expected = [by_step[version][row, place] for version, place in zip(versions, places, strict=True)]
            np.testing.assert_allclose(batch["logprobs"][row, places], expected, rtol=0, atol=1e-5)
            several += len({*versions}) > 1
            ages += [step - version for version in versions]
        assert metrics["rollout_staleness"] == pytest.approx(np.mean(ages))
        assert len({len(np.flatnonzero(weights)) for weights in batch["weights"]}) > 1
    assert several > 8


@pytest.mark.full
@pytest.mark.draws(1)
def test_what_is_said_between_parts_is_what_the_environment_says_to_whole_answers(made, learning, states):
    """Each answer up to the token that ends it, and then as many as there were of them."""
    data, stops = replace(learning.data, environment=WORLDS["episodes"]), learning.data.sampling.stop_ids
    tokenizer, turns = data.prepare(lambda line: None).tokenizer, 0
    for batch, _ in drawn(made, data, states):
        for targets, weights in zip(batch["targets"], batch["weights"], strict=True):
            ends = np.flatnonzero((weights > 0) & np.isin(targets, stops))[:3]
            for number, end in enumerate(ends, 1):
                words = tokenizer.encode(f"={number}.")
                assert targets[end + 1 : end + 1 + len(words)].tolist() == words
                assert not weights[end + 1 : end + 1 + len(words)].any()
            turns += len(ends)
    assert turns > 8


@pytest.mark.full
@pytest.mark.draws(1)
def test_an_environment_that_says_something_else_in_a_further_step_costs_its_episodes(made, learning, states):
    data = replace(learning.data, environment=Fickle(rounds=3))
    failed = [metrics["environment_failed"] for _, metrics in drawn(made, data, states)]
    assert failed[0] == 0  # a batch that the first step samples to its end
    assert min(failed[1:]) > 0


@pytest.mark.full
@pytest.mark.draws(1)
def test_answers_that_waited_in_a_checkpoint_of_an_earlier_form_are_sampled_anew(made, learning, states):
    """`answers`, as of versions without episodes."""
    lines = []
    saved = {"pending": [{"number": number, "answers": [{"ids": [1]}]} for number in (1, 2)]}
    context = FeedContext(7, made.runtime, start=1, saved=saved, objective=GRPO(), report=lines.append)
    feed = learning.data.prepare(lines.append).feed
    with feed(context) as old, feed(replace(context, saved={})) as new:
        jax.tree.map(np.testing.assert_array_equal, old.draw(states[1]), new.draw(states[1]))
    assert any("waited in the checkpoint (2 batches" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_processes_that_sample_continue_what_the_run_would(world, made, learning, states, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    data = replace(learning.data, environment=WORLDS[world])
    expected = drawn(made, data, states)
    found = drawn(made, replace(data, samplers=Samplers(processes=2)), states, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS)
def test_a_run_that_was_stopped_in_the_midst_of_answers_continues_bit_for_bit(world, learning, do, tmp_path):
    learning = replace(learning, data=replace(learning.data, environment=WORLDS[world]))
    whole = do(learning, tmp_path / "whole")
    do(learning, tmp_path / "stopped", steps=3)
    ran = do(learning, tmp_path / "stopped")
    names = ("loss", "grad_norm", "reward", "rollout_staleness", "rollout_parts", "rollout_tokens")
    assert ran.records(*names) == whole.records(*names)
    assert any(parts > 1 for *_, parts, _ in whole.records(*names))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"staleness": 0}, ("Rollouts.partial is 4", "Rollouts.staleness 0", "at least 1")),
        ({"redraws": 1}, ("Rollouts.redraws 1", "known once all")),
        ({"sampling": Sampling(stop=("x",))}, ("Sampling.stop ('x',)",)),
        ({"sampling": Sampling(presence_penalty=1.0)}, ("Sampling.presence_penalty 1.0",)),
    ],
)
def test_what_needs_whole_answers_is_told_by_field(change, said, learning):
    with pytest.raises(UserError) as error:
        replace(learning.data, **change)
    assert all(part in str(error.value) for part in said), error.value


def test_an_objective_that_asks_the_weights_that_sampled_is_told(learning):
    prepared = learning.data.prepare(lambda line: None)
    with pytest.raises(UserError, match=r"Rollouts\.partial is 4, and PPO"):
        prepared.check_fits(ActorCritic(learning.model), PPO(), 48)
