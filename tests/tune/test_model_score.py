"""Rewards of a frozen model on the mesh; and a run whose rewards cannot be asked saves what it has."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import likes
import numpy as np
import pytest

from axon.data import FeedContext, JsonLines, TokenizerFile
from axon.errors import Unavailable, UserError
from axon.layout import Layout
from axon.nn import Inputs
from axon.nn.lora import LoRA
from axon.run import Evaluation, Reference, program
from axon.runtime import Runtime, nested
from axon.serve import Sampling
from axon.train.adapters_off import AdaptersOff
from axon.train.objective import NextToken
from axon.train.policy_gradient import GRPO, RLOO
from axon.train.preference import Reward
from axon.tune import Addition, Chats, Comparisons, ExactMatch, ModelScore, RewardModel, Rollouts

SAMPLING = Sampling(tokens=6, temperature=1.0, stop_ids=tuple(range(0, 320, 3)))
LAYOUTS = {"one": (1, Layout()), "zero, tensor": (4, Layout({"data": 2, "tensor": 2}, zero=3))}


@pytest.fixture(scope="module")
def learning(tiny, prompts, caches):
    """A run that learns from a frozen model's scores."""
    data = Rollouts(tiny.data, {"model": ModelScore(scale=2.0, shift=0.5)}, prompts=(prompts,), sampling=SAMPLING)
    frozen = {"scorer": Reference(RewardModel(replace(tiny.model, embed=16, heads=2, kv_heads=2)), "nowhere")}
    return replace(tiny, data=data, objective=RLOO(), references=frozen, steps=4, evaluation=None)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_answers_reward_is_the_frozen_models_score_at_its_last_token(
    layout, learning, few, begun, random_parameters, rng
):
    """Each computed alone, in float32, on one device; answers are of several lengths."""
    devices, own = LAYOUTS[layout]
    with few(devices):
        made = program(replace(learning, layout=own))
        scorer = made.references.runtimes["scorer"]
        values = random_parameters(scorer.module, rng)
        places = jax.tree.map(lambda leaf: leaf.sharding, scorer.abstract(nested(scorer.parameters)))
        made.references.give("scorer", jax.device_put(values, places))
        context = FeedContext(7, made.runtime, objective=RLOO(), references=made.references, report=print)
        prepared = learning.data.prepare(lambda line: None)
        prepared.check_fits(learning.model, learning.objective, 32)
        with prepared.feed(context) as feed:
            batch, metrics = feed.draw(begun(made, rng)), feed.metrics
    rewards = 2 * (scores_alone(learning, few, values, rows_of(batch)) - 0.5)
    assert len({len(row) for row in rows_of(batch)}) > 1
    assert metrics["reward_model"] == pytest.approx(rewards.mean(), rel=1e-4, abs=1e-5)
    assert metrics["reward_model_std"] == pytest.approx(rewards.std(), rel=1e-4, abs=1e-5)
    first = np.argmax(batch["weights"] > 0, axis=1)
    advantages = RLOO().advantages(rewards.reshape(2, 4)).ravel()
    np.testing.assert_allclose(batch["advantages"][np.arange(8), first], advantages, rtol=1e-3, atol=1e-5)


def rows_of(batch):
    """The tokens of each sequence that a score is read of: all but the last, which is a target alone."""
    return [row[: np.sum(documents >= 0)] for row, documents in zip(batch["tokens"], batch["documents"], strict=True)]


def scores_alone(learning, few, values, rows):
    """The score of the last token of each row, by the module itself."""

    def score(values, tokens):
        module, positions = runtime.bind(values), jnp.arange(tokens.shape[1])[None]
        hidden = module.hidden(Inputs(tokens, positions, jnp.zeros_like(tokens)))[0]
        return hidden[0, -1] @ module.score[...]

    with few(1):
        runtime = Runtime(learning.references["scorer"].model, Layout())
        places = jax.tree.map(lambda leaf: leaf.sharding, runtime.abstract(nested(runtime.parameters)))
        values = jax.device_put(values, places)
        with runtime.tracing():
            return np.array([runtime.jit(score)(values, row[None]) for row in rows])


@pytest.mark.full
def test_a_run_learns_and_is_evaluated_by_the_scores_of_another_run(learning, tiny, do, tmp_path):
    """Sampled answers and held-out ones: the reward of both is that model's alone."""
    base = do(replace(tiny, steps=1, evaluation=None), tmp_path / "base")
    shape = {"seq": 64, "batch": 8, "tokenizer": TokenizerFile(str(base.folder / "tokenizer.json")), "held_out": 0.2}
    pairs = [{"prompt": f"{n}+1", "chosen": str(n + 1), "rejected": str(n)} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    compared = Comparisons(**shape, sources=(JsonLines(str(tmp_path / "pairs.jsonl")),))
    scorer = replace(tiny, model=RewardModel(tiny.model), data=compared, objective=Reward(), steps=2, evaluation=None)
    ran = do(scorer, tmp_path / "scorer")
    data = replace(learning.data, data=Chats(**shape, sources=(Addition(count=40, largest=9),)), prompts=())
    frozen, seen = {"scorer": Reference(scorer.model, str(ran.folder))}, Evaluation(every=2, answers=3)
    done = do(replace(learning, data=data, references=frozen, steps=2, evaluation=seen), tmp_path / "run")
    for _, reward, score, spread in done.records("reward", "reward_model", "reward_model_std"):
        assert reward == score
        assert spread > 0
    scores = [answer["scores"] for answer in done.events("evaluation")[-1]["answers"]]
    assert len({one["reward_model"] for one in scores}) > 1
    assert all(one["reward_model"] == one["reward"] for one in scores)


# ---- what cannot be asked --------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_whose_judge_is_gone_saves_its_step_and_continues_from_it(staleness, learning, do, tmp_path, monkeypatch):
    data = replace(learning.data, rewards={"judge": likes.judged}, staleness=staleness)
    learning = replace(learning, data=data, objective=GRPO(), references={}, steps=3)
    monkeypatch.setattr(likes, "LEFT", [8 * 2 + 3])
    with pytest.raises(Unavailable, match=r"the reward 'judge' \(.*likes\.py.*\): the judge does not answer"):
        do(learning, tmp_path / "stopped")
    monkeypatch.undo()
    ran = do(learning, tmp_path / "stopped")
    steps = [record["step"] for record in ran.events("save_end")]
    assert steps[0] == 2
    whole = do(learning, tmp_path / "whole")
    names = ("loss", "grad_norm", "reward")
    same = 3 - staleness  # what waited was sampled by weights that are gone
    assert ran.records(*names)[:same] == whole.records(*names)[:same]
    assert len(ran.records(*names)) == 3


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_frozen_models_that_are_missing_unused_or_give_no_score_are_told(learning, few):
    with few(1):
        with pytest.raises(UserError, match=r"Train\.data needs a frozen model named 'scorer'.*has none"):
            program(replace(learning, references={}))
        with pytest.raises(UserError, match=r"Train\.references has 'scorer'.*NextToken.*use no frozen model"):
            program(replace(learning, data=learning.data.data, objective=NextToken()))
        adapted = replace(learning, transforms=(LoRA(rank=2),))
        for one, said in ((Reference(learning.model, "nowhere"), "`score`"), (AdaptersOff(), "AdaptersOff")):
            made = program(replace(adapted, references={"scorer": one}))
            context = FeedContext(7, made.runtime, objective=RLOO(), references=made.references)
            with pytest.raises(UserError, match=said):
                learning.data.prepare(lambda line: None).feed(context)


def test_a_name_of_two_rewards_and_a_weight_of_none_are_told(learning):
    with pytest.raises(UserError, match="'modl'"):
        replace(learning.data, weights={"modl": 2.0})
    assert replace(learning.data, rewards={"model": ModelScore(), "exact": ExactMatch()}, weights={"model": 2.0})
