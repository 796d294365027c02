"""Episodes of several turns: what is in them, what is learned of them, and what an environment may do wrong."""

import os
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import likes
import numpy as np
import pytest
from worlds import WORDS, Counting, Failing, Late, Speaker, Without

from axon.data import Bpe, FeedContext
from axon.errors import UserError
from axon.layout import Execution
from axon.run import program
from axon.run.answers import Answers
from axon.serve import Finish, Request, Sampling
from axon.serve.chat import Chat
from axon.serve.step import SAME_SUMS
from axon.train.policy_gradient import GRPO
from axon.tune import Addition, Calculator, Chats, Rollouts
from axon.tune.environments import calculated

SAMPLING = Sampling(tokens=6, temperature=1.0, stop_ids=tuple(range(0, 320, 3)))
"""A third of the tokens end an answer."""


@pytest.fixture(scope="module")
def playing(tiny, prompts, caches):
    """A run that learns from episodes."""
    data = replace(tiny.data, seq=48)
    rollouts = Rollouts(data, environment=Counting(), prompts=(prompts,), samples=4, sampling=SAMPLING)
    return replace(tiny, data=rollouts, objective=GRPO(), steps=4, evaluation=None)


@pytest.fixture(scope="module")
def made(playing, few):
    with few(1):
        return program(playing)


@pytest.fixture(scope="module")
def played(made, playing, begun, shared_seed):
    """A state, and the batch, the metrics and the lines of its episodes."""
    state = begun(made, np.random.default_rng(shared_seed))
    return state, *drawn(made, playing.data, state)


def drawn(made, data, state, number=0):
    """A batch, its metrics, and the lines that were reported."""
    lines = []
    context = FeedContext(7, made.runtime, start=number, objective=GRPO(), report=lines.append)
    with data.prepare(lambda line: None).feed(context) as feed:
        return feed.draw(state), feed.metrics, lines


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def same(one, other):
    return all((one[name] == other[name]).all() for name in one)


# ---- what is in a batch ----------------------------------------------------------------------------------------------


def test_what_the_environment_says_follows_as_tokens_and_alone_is_not_learned(made, playing, begun, rng):
    """Of each sequence, from its mask: the prompt, and in turn what was sampled and what was said, token by token."""
    batch, metrics, _ = drawn(made, playing.data, begun(made, rng))
    tokenizer = playing.data.prepare(str).tokenizer
    turns = []
    for row in range(8):
        count = int((batch["documents"][row] == 0).sum())
        targets, learned = batch["targets"][row][:count].tolist(), batch["weights"][row][:count] > 0
        first = int(np.argmax(learned))
        assert tokenizer.visible([batch["tokens"][row][0], *targets[:first]]) in WORDS
        at, said = first, 0
        while at < count:
            end = next((place for place in range(at, count) if targets[place] in SAMPLING.stop_ids), count - 1) + 1
            end = min(end, at + SAMPLING.tokens)
            assert learned[at:end].all()
            said += 1
            words = tokenizer.encode(f"={said}.") if end < count else []
            assert targets[end : end + len(words)] == words
            assert not learned[end : end + len(words)].any()
            at = end + len(words)
        turns.append(said)
        assert not batch["logprobs"][row][:count][~learned].any()
        assert (batch["logprobs"][row][:count][learned] < 0).all()
    assert max(turns) == 3
    assert metrics["rollout_turns"] == np.mean(turns)
    lengths = (batch["weights"] > 0).sum(axis=1)
    assert metrics["rollout_tokens"] == metrics["reward_environment"] == np.mean(lengths)
    expected = GRPO().advantages(lengths.reshape(2, 4).astype(float)).ravel()
    found = batch["advantages"][np.arange(8), np.argmax(batch["weights"], axis=1)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("change", "most"), [({"turns": 2}, 2), ({"data": 14}, 3)], ids=("turns", "room"))
def test_an_episode_that_a_limit_ends_is_counted_and_fits(change, most, made, playing, begun, rng):
    if "data" in change:
        longest = max(len(prompt.ids) for prompt in playing.data.prepare(str).prompts)
        change = {"data": replace(playing.data.data, seq=longest + SAMPLING.tokens)}
    data = replace(playing.data, environment=Counting(rounds=9), **change)
    batch, metrics, _ = drawn(made, data, begun(made, rng))
    assert metrics["rollout_cut"] == 1
    assert 1 < metrics["rollout_turns"] <= most
    assert metrics["environment_failed"] == metrics["reward_failed"] == 0
    assert (batch["weights"] > 0).any(axis=1).all()


def test_the_sampler_has_the_training_forwards_bits_in_every_turn(playing, few, begun, rng):
    model = replace(playing.model, embed=64, heads=2, kv_heads=1, head_dim=64)
    data = replace(playing.data, data=replace(playing.data.data, seq=64))
    with few(1):
        made = program(replace(playing, model=model, data=data, execution=Execution(compiler_options=SAME_SUMS)))
    state = begun(made, rng)
    batch, metrics, _ = drawn(made, data, state)
    assert metrics["rollout_turns"] > 1
    assert float(made.step(state, made.place(batch))[1]["logprob_gap"]) == 0


@pytest.mark.full
@pytest.mark.draws(1)
def test_coroutines_of_any_duration_make_the_same_batch(made, playing, played):
    state, expected, plain, _ = played
    for _ in range(2):
        batch, metrics, _ = drawn(made, replace(playing.data, environment=Late()), state)
        assert same(batch, expected)
        assert metrics == plain


@pytest.mark.full
@pytest.mark.draws(1)
def test_processes_make_the_batch_of_threads_are_kept_and_end_with_the_feed(made, playing, played, tmp_path):
    state, expected, plain, _ = played
    data = replace(playing.data, environment=Without(folder=str(tmp_path)), environment_processes=3)
    with data.prepare(str).feed(FeedContext(7, made.runtime, objective=GRPO())) as feed:
        assert same(feed.draw(state), expected)
        assert feed.metrics == plain
        feed.draw(state)
        pids = [int(path.name) for path in tmp_path.iterdir()]
        assert 1 <= len(pids) <= 3
        assert all(map(runs, pids))
    assert not any(map(runs, pids))


def test_rewards_see_the_turns_and_are_weighted_with_the_environments(made, playing, begun, rng):
    seen = []

    def looks(sampled):
        seen.append(sampled)
        return 1.0

    data = replace(playing.data, rewards={"looks": looks}, weights={"environment": 0.5, "looks": 3})
    _, metrics, _ = drawn(made, data, begun(made, rng))
    assert metrics["reward"] == pytest.approx(0.5 * metrics["reward_environment"] + 3)
    assert len(seen) == 8
    for one in seen:
        assert one.turns[1::2] == ("=1.", "=2.", "=3.")[: len(one.turns) // 2]
        assert one.turns[-1] == one.answer
        assert one.ended == (len(one.turns) == 5 and one.ids[-1] in SAMPLING.stop_ids)


@pytest.fixture(scope="module")
def chatting(tiny, few, caches):
    """A run that learns from episodes about the questions of chats, and its program."""
    sampling = replace(SAMPLING, stop_ids=tuple(range(0, 257, 2)))
    sums = (Addition(count=80, largest=9),)
    chats = Chats(seq=64, batch=8, sources=sums, tokenizer=Bpe(257), held_out=0.3, threads=0)
    data = Rollouts(chats, environment=Counting(role="tool"), turns=2, samples=2, sampling=sampling)
    with few(1):
        return data, program(replace(tiny, data=data, objective=GRPO()))


@pytest.mark.full
@pytest.mark.draws(1)
def test_an_episode_continues_a_chat_as_its_template_writes_it(chatting, begun, rng):
    """Of the questions of chats: an answer, what a tool says, and the prompt that opens the next answer."""
    data, made = chatting
    prepared = data.prepare(str)
    batch, metrics, _ = drawn(made, data, begun(made, rng))
    said = Chat.of(None, prepared.tokenizer).reply([{"role": "tool", "content": "=1."}])
    assert prepared.tokenizer.visible(said) == "tool: =1.\nassistant:"
    assert metrics["rollout_turns"] > 1
    for row in range(8):
        learned = batch["weights"][row] > 0
        first = int(np.argmax(learned))
        end = first + int(np.argmin(learned[first:]))
        if learned[end:].any():
            assert batch["targets"][row][end : end + len(said)].tolist() == said


@pytest.mark.full
def test_evaluation_plays_episodes_of_held_out_questions_by_greedy_choices(chatting, begun, rng):
    """Turn by turn as by requests of its own; right where the last answer is the right one."""
    data, made = chatting
    prepared = data.prepare(str)
    said = Chat.of(None, prepared.tokenizer).reply([{"role": "tool", "content": "=1."}])
    answers = Answers(made, prepared, {"": prepared.questions(12)})

    def greedy(ids):
        return answers._engine.answers(state, [Request(ids, replace(data.sampling, temperature=0.0))])[0]

    for _ in range(50):  # of random models, one that ends some of its answers
        state = begun(made, rng)
        if len({greedy(question.prompt).finish is Finish.STOP for question in prepared.questions(12)}) == 2:
            break
    questions, expected = [], {"exact": [], "reward": [], "turns": []}
    for question in prepared.questions(12):
        found = [greedy(question.prompt)]
        if found[0].finish is Finish.STOP:
            found.append(greedy((*question.prompt, *found[0].ids, *said)))
        right = rng.random() < 0.5
        questions.append(replace(question, answer=found[-1].ids if right else (0,)))
        for name, value in (("exact", right), ("reward", sum(len(one.ids) for one in found)), ("turns", len(found))):
            expected[name].append(value)
    answers._questions = questions
    scores = answers(state).scores
    assert {*expected["turns"]} == {1, 2}
    assert {name: scores[name].tolist() for name in expected} == expected


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_that_was_stopped_continues_bit_for_bit(playing, do, tmp_path):
    playing = replace(playing, data=replace(playing.data, environment=Late(), redraws=1))
    whole = do(playing, tmp_path / "whole")
    do(playing, tmp_path / "stopped", steps=2)
    ran = do(playing, tmp_path / "stopped")
    names = ("loss", "grad_norm", "policy", "reward", "rollout_turns", "rollout_cut", "environment_failed")
    assert ran.records(*names) == whole.records(*names)
    assert max(gap for _, gap in whole.records("logprob_gap")) <= 1e-5


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.draws(4)
@pytest.mark.parametrize(
    ("how", "processes"),
    [*((how, 0) for how in ("raise", "hang", "await", "number", "undefined", "reset")), ("hang", 3), ("die", 3)],
)
def test_what_an_environment_does_wrong_costs_its_sample_alone(how, processes, made, playing, played):
    state, expected, whole, _ = played
    data = replace(playing.data, environment=Failing(how=how), rewards={"short": likes.short}, limit=1.0)
    data = replace(data, environment_processes=processes)
    batch, metrics, lines = drawn(made, data, state)
    is_there = batch["weights"].any(axis=1)
    assert metrics["environment_failed"] == metrics["reward_failed"] == 8 - is_there.sum()
    assert 0 < is_there.sum() < 8
    for name in ("tokens", "targets", "weights", "logprobs"):
        np.testing.assert_array_equal(batch[name][is_there], expected[name][is_there], err_msg=name)
    (line,) = lines
    for part in ("worlds.py", f"{8 - is_there.sum()} of 8 episodes", "document"):
        assert part in line, line
    assert whole["environment_failed"] == 0


def test_weights_that_are_no_numbers_end_the_run_and_leave_no_thread_waiting(made, playing, begun, rng):
    state = begun(made, rng)
    state = replace(state, parameters=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.parameters))
    with pytest.raises(UserError, match="cannot answer with the weights of step 0"):
        drawn(made, playing.data, state)


def test_an_environment_that_no_process_can_be_sent_is_told(playing):
    with pytest.raises(UserError, match=r"Rollouts\.environment \(.*worlds\.py.*cannot be sent.*in reset"):
        replace(playing.data, environment=Counting(rounds=threading.Lock()), environment_processes=1)
    with pytest.raises(UserError, match=r"environment_processes is 2, and Rollouts\.environment is None"):
        replace(playing.data, environment=None, rewards={"short": likes.short}, environment_processes=2)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Speaker(), ("Rollouts.environment", "worlds.py", "'narrator'", "'tool' or 'user'")),
        (Speaker("tool"), ("Rollouts.environment", "worlds.py", "reset(prompt, seed)", "two arguments")),
        (likes, ("Rollouts.environment", "step(state, answer)", "role")),
        (Counting, ("Rollouts.environment", "step(state, answer)")),
    ],
    ids=("role", "signature", "member", "class"),
)
def test_what_is_no_environment_is_told_by_field_and_remedy(environment, said, playing):
    with pytest.raises(UserError) as error:
        replace(playing.data, environment=environment)
    assert all(part in str(error.value) for part in said), error.value


def test_rewards_are_needed_without_an_environment_and_have_other_names_beside_one(playing):
    with pytest.raises(UserError, match=r"Rollouts\.rewards is empty"):
        replace(playing.data, environment=None)
    with pytest.raises(UserError, match=r"Rollouts\.rewards\['environment'\].*rename"):
        replace(playing.data, rewards={"environment": likes.short})
    with pytest.raises(UserError, match=r"'other'; expected of environment, short"):
        replace(playing.data, rewards={"short": likes.short}, weights={"other": 1.0})


def test_a_calculator_works_out_whole_numbers_and_nothing_else(rng):
    for a, b, c in rng.integers(0, 500, (50, 3)).tolist():
        assert calculated(f"{a}*({b} + {c}) - -{b}") == str(a * (b + c) + b)
    for text in ("", "1/2", "2**9", "a+1", "1+", "True+1", "1.5+1", "exit()", "1" + "+1" * 200, "(" * 200, "1,2"):
        assert calculated(text) == "error"
    tool = Calculator()
    assert tool.step(None, " 12+30= ") == "42"
    assert tool.step(None, "42") is None
