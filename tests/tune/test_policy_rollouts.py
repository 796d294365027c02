"""Learning from rewards: the sampler has the training forward's log-probabilities, and what its batches have."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import likes
import numpy as np
import pytest
from worlds import WORDS

from axon.checkpoint import Reader
from axon.data import Bpe, FeedContext
from axon.errors import UserError
from axon.layout import Execution, Layout
from axon.nn.lora import LoRA
from axon.run import Evaluation, program
from axon.run.answers import Answers
from axon.serve import Capacity, Sampling
from axon.serve.step import SAME_SUMS
from axon.train.adapters_off import AdaptersOff
from axon.train.distillation import Distillation
from axon.train.objective import NextToken
from axon.train.policy_gradient import GRPO, RLOO
from axon.train.ppo import PPO
from axon.train.preference import DPO
from axon.tune import ActorCritic, Addition, BestAndWorst, BestAnswers, Chats, ExactMatch, Rollouts, rollouts


def silent(line):
    pass


def variety(sampled):
    """So that answers to a prompt differ in it."""
    return len(set(sampled.ids)) + 0.01 * (sampled.ids[0] % 7)


@pytest.fixture(scope="module")
def learning(tiny, prompts, caches):
    """A run that learns from rewards."""
    sampling = Sampling(tokens=6, temperature=1.0)
    data = Rollouts(tiny.data, {"variety": variety}, prompts=(prompts,), samples=4, sampling=sampling)
    return replace(tiny, data=data, objective=GRPO(), steps=4, evaluation=None)


def drawn(made, data, objective, state, number=0):
    """The batch that the state's model samples."""
    return drawn_with_metrics(made, data, objective, state, number)[0]


def drawn_with_metrics(made, data, objective, state, number=0):
    own = {"objective": objective, "references": made.references}
    with data.prepare(silent).feed(FeedContext(7, made.runtime, start=number, report=silent, **own)) as feed:
        return feed.draw(state), feed.metrics


def of_some(sampled):
    """Differs between the answers to three of the five prompts."""
    return sum(sampled.ids) if sampled.prompt in WORDS[:3] else 0.0


def same_for_all(sampled):
    return 1.0


def asked(prepared, batch):
    """The number of the prompt of each sequence."""
    starts = [
        tokens[: np.argmax(weights) + 1] for tokens, weights in zip(batch["tokens"], batch["weights"], strict=True)
    ]
    known = [prompt.ids for prompt in prepared.prompts]
    return [known.index(tuple(start)) for start in starts]


def gap_of(made, state, batch):
    return float(made.step(state, made.place(batch))[1]["logprob_gap"])


# ---- the sampler is the trainer --------------------------------------------------------------------------------------

SAMPLINGS = {
    "plain": Sampling(tokens=6, temperature=1.0),
    "hot": Sampling(tokens=6, temperature=1.7),
    "cold, top-p and top-k": Sampling(tokens=6, temperature=0.6, top_p=0.7, top_k=20),
    "penalties": Sampling(tokens=6, temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5),
}


@pytest.mark.few(name=("hot", "cold, top-p and top-k"))
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_samplers_log_probabilities_are_those_of_the_training_forward(name, learning, few, begun, rng):
    """Both of the model's own distribution, whatever the temperature, the filters and the penalties of the draw."""
    data = replace(learning.data, sampling=SAMPLINGS[name])
    with few(1):
        made = program(learning)
    state = begun(made, rng)
    batch = drawn(made, data, learning.objective, state)
    assert (batch["logprobs"][batch["weights"] > 0] < 0).all()
    assert gap_of(made, state, batch) <= 1e-5


@pytest.mark.full
@pytest.mark.draws(1)
def test_on_a_cpu_they_have_the_training_forwards_bits_where_all_sums_are_in_one_order(learning, few, begun, rng):
    """Sums over elements that XLA leaves to no library, and products with 64 columns and more than a row."""
    model = replace(learning.model, embed=64, heads=2, kv_heads=1, head_dim=64)
    data = replace(learning.data, data=replace(learning.data.data, seq=64))
    learning = replace(learning, model=model, data=data, execution=Execution(compiler_options=SAME_SUMS))
    with few(1):
        made = program(learning)
    state = begun(made, rng)
    batch = drawn(made, data, learning.objective, state)
    assert (batch["logprobs"][batch["weights"] > 0] < 0).all()
    assert gap_of(made, state, batch) == 0


@pytest.fixture
def counts(monkeypatch):
    """counts(capacity): a list that each feed's engine of this capacity puts its counts into when it is closed."""

    def of(capacity):
        found = []

        class Watched(rollouts.PolicyEngine):
            def close(self):
                found.extend(engine.stats() for engine in self._engines)
                super().close()

        monkeypatch.setattr(rollouts, "PolicyEngine", Watched)
        monkeypatch.setattr(rollouts, "capacity_for", lambda *_: capacity)
        return found

    return of


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_preempted_answer_keeps_its_log_probabilities(learning, few, begun, rng, counts):
    """So few pages that answers lose theirs, and are computed again."""
    found = counts(Capacity(8, 16, 32, page_size=4, cache_tokens=64))
    with few(1):
        made = program(learning)
    state = begun(made, rng)
    batch = drawn(made, learning.data, learning.objective, state)
    assert found[0].preemptions
    assert gap_of(made, state, batch) <= 1e-5


def test_the_answers_to_a_prompt_share_its_pages(learning, few, begun, rng, counts):
    found, data = counts(Capacity(8, 16, 32, page_size=2)), learning.data
    with few(1):
        made = program(learning)
    drawn(made, data, learning.objective, begun(made, rng))
    whole_pages = [(len(prompt.ids) - 1) // 2 * 2 for prompt in data.prepare(silent).drawn(7, 0)]
    assert sum(whole_pages)
    assert found[0].prefix_hits >= (data.samples - 1) * sum(whole_pages)


@pytest.mark.full
def test_adapters_and_a_frozen_model_have_no_gap(learning, few, begun, rng):
    references, objective = {"reference": AdaptersOff()}, GRPO(kl=0.1)
    learning = replace(learning, transforms=(LoRA(rank=2, alpha=0.2),), references=references, objective=objective)
    with few(1):
        made = program(learning)
    state = begun(made, rng)
    assert gap_of(made, state, drawn(made, learning.data, objective, state)) <= 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [Layout({"data": 2}, zero=3), Layout({"tensor": 2}), Layout({"context": 2})],
    ids=("zero", "tensor", "context"),
)
def test_no_layout_has_a_gap(layout, learning, few, begun, rng):
    with few(2):
        made = program(replace(learning, layout=layout))
        state = begun(made, rng)
        assert gap_of(made, state, drawn(made, learning.data, learning.objective, state)) <= 1e-5


def test_stale_weights_show_as_a_gap(learning, few, begun, rng):
    with few(1):
        made = program(learning)
    state = begun(made, rng)
    batch = drawn(made, learning.data, learning.objective, state)
    stale = jax.tree.map(lambda x: x, state.parameters)
    gate = stale["layers"]["block"]["mlp"]["gate"]
    stale["layers"]["block"]["mlp"]["gate"] = gate.at[0, 0, 0].add(1.0)
    assert gap_of(made, replace(state, parameters=stale), batch) > 1e-4


# ---- what a batch has ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [GRPO(), RLOO()], ids=lambda value: type(value).__name__)
def test_each_answer_has_the_advantage_of_its_group_and_a_failed_one_is_padding(objective, learning, few, begun, rng):
    data = replace(learning.data, rewards={"mine": likes.third_fails})
    with few(1):
        made = program(replace(learning, objective=objective))
    batch = drawn(made, data, objective, begun(made, rng))
    first = np.argmax(batch["weights"], axis=1)
    ids = batch["targets"][np.arange(8), first]
    is_there = batch["weights"].any(axis=1)
    assert (ids[is_there] % 3 > 0).all()
    rewards = np.where(is_there, ids, np.nan).reshape(2, 4)
    for row, advantage in enumerate(objective.advantages(rewards).ravel()):
        learned = batch["weights"][row] > 0
        np.testing.assert_allclose(batch["advantages"][row][learned], advantage, rtol=1e-6)
        assert not batch["advantages"][row][~learned].any()
        assert not batch["logprobs"][row][~learned].any()


@pytest.mark.full
def test_prompts_whose_answers_have_the_same_reward_are_replaced_until_none_is_left(learning, few, begun, rng):
    """By others, of the batch's number alone, each with noise of its own; advantages are of those in the batch."""
    data = replace(learning.data, rewards={"some": of_some}, redraws=4)
    prepared = data.prepare(silent)
    with few(1):
        made = program(learning)
    state, replaced = begun(made, rng), 0
    for number in range(4):
        first = [prompt.text in WORDS[:3] for prompt in prepared.drawn(7, number)]
        context = FeedContext(7, made.runtime, start=number, objective=learning.objective, report=silent)
        with prepared.feed(context) as feed:
            batch, spent = feed.draw(state), feed.metrics
        groups = asked(prepared, batch)[::4]
        assert [prepared.prompts[group].text in WORDS[:3] for group in groups] == [True, True]
        assert len(set(groups)) == 2
        assert all(
            group == one for group, one, kept in zip(groups, first_of(prepared, number), first, strict=True) if kept
        )
        rewards = np.sum(np.where(batch["weights"] > 0, batch["targets"], 0.0), axis=1).reshape(2, 4)
        found = batch["advantages"][np.arange(8), np.argmax(batch["weights"], axis=1)]
        np.testing.assert_allclose(found, learning.objective.advantages(rewards).ravel(), rtol=1e-5)
        drawn_in_all = round(2 / (1 - spent["rollout_dropped"]))
        assert spent["rollout_uniform"] == pytest.approx((drawn_in_all - 2) / drawn_in_all)
        replaced += drawn_in_all - 2
        again = drawn(made, data, learning.objective, state, number)
        assert all((again[name] == batch[name]).all() for name in batch)
    assert replaced


def first_of(prepared, number):
    return [prepared.prompts.index(prompt) for prompt in prepared.drawn(7, number)]


@pytest.mark.full
@pytest.mark.draws(2)
@pytest.mark.parametrize(("redraws", "dropped"), [(0, 0), (1, 2 / 4), (9, 3 / 5)])
def test_so_many_times_at_most_and_no_prompt_twice_are_they_replaced(redraws, dropped, learning, few, begun, rng):
    data = replace(learning.data, rewards={"same": same_for_all}, redraws=redraws)
    with few(1):
        made = program(learning)
    with data.prepare(silent).feed(FeedContext(7, made.runtime, objective=learning.objective)) as feed:
        batch = feed.draw(begun(made, rng))
        assert feed.metrics["rollout_dropped"] == pytest.approx(dropped)
        assert feed.metrics["rollout_uniform"] == 1
    assert batch["weights"].any(axis=1).all()
    assert not batch["advantages"].any()


@pytest.mark.full
@pytest.mark.draws(1)
def test_the_questions_of_chats_are_prompts_and_rewards_see_the_right_answers(tiny, few, begun, rng):
    seen = []

    def looks(sampled):
        seen.append(sampled)
        return ExactMatch()(sampled) + sum(sampled.ids)

    chats = Chats(
        seq=48, batch=8, sources=(Addition(count=40, largest=9),), tokenizer=Bpe(257), held_out=0.2, threads=0
    )
    data = Rollouts(chats, {"looks": looks}, samples=2, sampling=Sampling(tokens=4, temperature=1.0))
    train = replace(tiny, data=data, objective=GRPO())
    with few(1):
        made = program(train)
    prepared = data.prepare(silent)
    batch = drawn(made, data, train.objective, begun(made, rng))
    made.evaluator.check_arrays(prepared.arrays)
    assert len(seen) == 8
    for one, tokens in zip(seen, batch["tokens"], strict=True):
        assert sum(map(int, one.record["prompt"].split("+"))) == int(one.reference) == int(one.record["completion"])
        assert one.record["prompt"] in one.prompt
        assert prepared.tokenizer.visible(tokens).startswith(one.prompt.rstrip())
    held_out = {tuple(question.prompt) for question in prepared.questions(100)}
    assert held_out
    assert not held_out & {prompt.ids for prompt in prepared.prompts}
    with prepared.held_out(1) as batches:
        found = made.evaluate(begun(made, rng), made.place(next(batches)))
        assert float(found["loss"][0]) > 0
    del seen[:]
    questions = prepared.questions(5)
    answered = Answers(made, prepared, {"": questions}, silent)(begun(made, rng))
    assert [one.reference for one in seen] == [prepared.tokenizer.visible(one.answer) for one in questions]
    assert answered.scores["reward"].tolist() == [sum(one.ids) + ExactMatch()(one) for one in seen]


PPO_LAYOUTS = {"one": Layout({"data": 1}), "data": Layout({"data": 2}, zero=3), "context": Layout({"context": 2})}


@pytest.mark.full
@pytest.mark.few(layout=("context",))
@pytest.mark.parametrize("layout", PPO_LAYOUTS)
def test_values_and_the_divergence_in_the_rewards_are_of_the_weights_that_sample(layout, learning, few, begun, rng):
    """With γ = λ = 1 the return is the sum of the rewards to come: the answer's, less β·log(π/π_ref) of each token."""
    objective, model, references = (
        PPO(kl=0.2, gae_lambda=1.0),
        ActorCritic(learning.model),
        {"reference": AdaptersOff()},
    )
    fields = {"transforms": (LoRA(rank=2, alpha=2.0),), "references": references, "layout": PPO_LAYOUTS[layout]}
    with few(1 if layout == "one" else 2):
        made = program(replace(learning, model=model, objective=objective, **fields))
        for state, is_reference in ((made.init(), True), (begun(made, rng), False)):
            batch, spent = drawn_with_metrics(made, learning.data, objective, state)
            sampled = batch["weights"] > 0
            rewards = [
                variety(SimpleNamespace(ids=ids[own])) for ids, own in zip(batch["targets"], sampled, strict=True)
            ]
            first = batch["returns"][np.arange(8), np.argmax(sampled, axis=1)]
            divergence = np.sum(np.array(rewards) - first) / 0.2 / np.sum(sampled)
            assert divergence == pytest.approx(spent["kl"], abs=1e-3)
            assert is_reference == (abs(spent["kl"]) < 1e-5)
            expected = np.mean((batch["values"] - batch["returns"])[sampled] ** 2) / 2
            metrics = made.step(state, made.place(batch))[1]
            assert float(metrics["value"]) == pytest.approx(expected, rel=1e-4)
            assert float(metrics["value_clipped"]) == 0


def of_odd_sums(sampled):
    """The same for all answers to every other sum."""
    return float(sum(sampled.ids)) if int(sampled.reference) % 2 else 1.0


@pytest.fixture(scope="module")
def comparing(tiny, caches):
    """A run that prefers the best of its own answers to the worst."""
    sums = (Addition(count=40, largest=9),)
    chats = Chats(seq=96, batch=8, sources=sums, tokenizer=Bpe(257), held_out=0.2, threads=0, packed=4)
    own = {"samples": 3, "selection": BestAndWorst(), "sampling": Sampling(tokens=4, temperature=1.0)}
    adapters = {"references": {"reference": AdaptersOff()}, "transforms": (LoRA(rank=2, alpha=2.0),)}
    return replace(tiny, data=Rollouts(chats, {"odd": of_odd_sums}, **own), objective=DPO(beta=0.3), **adapters)


def log_probabilities(made, state, batch):
    """Of each token of the vocabulary at each place of a batch, by the trained model and by the frozen one."""

    def found(parameters, variables, batch):
        (frozen,) = made.references.bound({}, parameters, variables).values()
        modules, inputs = (made.runtime.bind(parameters, variables), frozen), NextToken().inputs(batch)
        return [jax.nn.log_softmax(one.output.logits(one.hidden(inputs)[0])) for one in modules]

    placed = made.place(batch)
    placed["documents"] = placed.get("answers", placed.get("documents"))
    with made.runtime.tracing():
        return jax.device_get(made.runtime.jit(found)(state.parameters, state.variables, placed))


@pytest.mark.full
def test_online_dpo_compares_the_best_and_the_worst_of_a_group_and_its_loss_is_dpos(comparing, few, begun, rng):
    seen, margins = [], []

    def looks(sampled):
        seen.append((of_odd_sums(sampled), sampled.ids))
        return seen[-1][0]

    data = replace(comparing.data, rewards={"looks": looks})
    with few(1):
        made = program(comparing)
    state, prepared = begun(made, rng), data.prepare(silent)
    made.evaluator.check_arrays(prepared.arrays)
    prepared.check_fits(comparing.model, comparing.objective, 96)
    batch, spent = drawn_with_metrics(made, data, comparing.objective, state)
    targets = batch["targets"][..., None]
    logps = [np.take_along_axis(one, targets, -1)[..., 0] for one in log_probabilities(made, state, batch)]
    for row in range(8):
        group = seen[3 * row : 3 * row + 3]
        learned = [(batch["answers"][row] == side) & (batch["weights"][row] > 0) for side in range(2)]
        if len({reward for reward, _ in group}) == 1:
            assert not batch["weights"][row].any()
            continue
        for own, (_, ids) in zip(learned, (max(group), min(group)), strict=True):
            assert tuple(batch["targets"][row][own]) == ids
        chosen, rejected = (np.sum(logps[0][row][own]) - np.sum(logps[1][row][own]) for own in learned)
        margins.append(0.3 * (chosen - rejected))
    assert 0 < len(margins) < 8
    assert spent["rollout_trained"] == len(margins) / 8
    metrics = made.step(state, made.place(batch))[1]
    assert float(metrics["loss"]) == pytest.approx(np.mean(np.logaddexp(0, -np.array(margins))), rel=1e-4)
    with prepared.held_out(1) as batches:
        total, count = made.evaluate(made.init(), made.place(next(batches)))["loss"]
    assert float(total / count) == pytest.approx(np.log(2), rel=1e-5)  # the model is the frozen one yet


@pytest.mark.full
def test_a_teacher_is_learned_from_on_the_models_own_answers_without_rewards(learning, few, begun, rng):
    """Its loss is the reverse divergence at the tokens that the model samples, and falls where it is learned from."""
    data = replace(learning.data, rewards={}, samples=1, selection=BestAnswers())
    fields = {"references": {"teacher": AdaptersOff()}, "transforms": (LoRA(rank=2, alpha=2.0),)}
    objective = Distillation(divergence="reverse")
    with few(1):
        made = program(replace(learning, data=data, objective=objective, **fields))
    state, found = begun(made, rng), []
    with data.prepare(silent).feed(FeedContext(7, made.runtime, objective=objective)) as feed:
        batch = feed.draw(state)
        assert not [name for name in feed.metrics if name.startswith("reward")]
        own, teacher = map(np.float64, log_probabilities(made, state, batch))
        expected = np.sum(np.exp(own) * (own - teacher), axis=-1)[batch["weights"] > 0].mean()
        for _ in range(6):
            state, metrics = made.step(state, made.place(batch))
            found.append(float(metrics["divergence"]))
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[-1] < 0.9 * found[0]


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.few(objective=(PPO(),))
@pytest.mark.parametrize("objective", [GRPO(), PPO()], ids=lambda value: type(value).__name__)
def test_a_run_is_evaluated_before_its_first_step_and_continues_bit_for_bit(objective, learning, do, few, tmp_path):
    learning = replace(learning, objective=objective, model=ActorCritic(learning.model))
    data = replace(learning.data, rewards=learning.data.rewards | {"some": of_some}, redraws=2)
    learning = replace(learning, data=data, evaluation=Evaluation(every=4, at_start=True))
    whole = do(learning, tmp_path / "whole")
    do(learning, tmp_path / "stopped", steps=2)
    ran = do(learning, tmp_path / "stopped")
    names = ("loss", "grad_norm", "policy", "logprob_gap", "reward", "reward_variety_std", "rollout_dropped")
    assert ran.records(*names) == whole.records(*names)
    assert max(gap for *_, gap, _, _, _ in whole.records(*names)) <= 1e-5
    assert [one["step"] for one in whole.events("evaluation")] == [0, 4]
    assert [one["step"] for one in ran.events("evaluation")] == [0, 2, 4]
    with few(1):
        parts = {"parameters": program(learning).abstract_state().parameters}
    for one, other in zip(
        *(jax.tree.leaves(Reader(x.folder / "checkpoints").restore_parts(parts)) for x in (whole, ran)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.draws(1)
def test_every_failure_is_counted_and_no_run_ends_by_it(learning, do, tmp_path):
    ran = do(replace(learning, data=replace(learning.data, rewards={"bad": likes.raises}), steps=1), tmp_path / "run")
    ((_, failed, norm),) = ran.records("reward_failed", "grad_norm")
    assert (failed, norm) == (8, 0)
    assert sum("the reward 'bad'" in line and "8 of 8" in line for line in ran.lines) == 1


@pytest.mark.full
@pytest.mark.draws(1)
def test_what_is_sampled_a_step_before_is_weighted_by_its_own_probabilities(learning, do, tmp_path):
    """Ratios other than one, which `logprob_gap` shows, from the second step on."""
    learning = replace(learning, data=replace(learning.data, staleness=1))
    ran = do(learning, tmp_path / "run")
    (first, *gaps) = [gap for _, gap in ran.records("logprob_gap")]
    assert first <= 1e-5
    assert min(gaps) > 1e-4


@pytest.mark.full
@pytest.mark.draws(1)
def test_stale_values_are_those_of_the_weights_that_sampled(learning, do, tmp_path):
    """The critic's are 0 at first, and clipped about what they were a step before from the second step on."""
    data, model = replace(learning.data, staleness=1), ActorCritic(learning.model)
    ran = do(replace(learning, data=data, model=model, objective=PPO(value_clip=1e-4)), tmp_path / "run")
    (first, *clipped) = [share for _, share in ran.records("value_clipped")]
    assert first == 0
    assert min(clipped) > 0


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_objectives_and_groups_that_do_not_fit_are_told_by_field_and_remedy(learning):
    prepared = learning.data.prepare(silent)
    with pytest.raises(UserError, match=r"Train\.objective is a NextToken.*AllAnswers.*@GRPO\(\)"):
        prepared.check_fits(learning.model, NextToken(), 32)
    with pytest.raises(UserError, match=r"Train\.objective is a DPO.*AllAnswers.*@BestAndWorst\(\)"):
        prepared.check_fits(learning.model, DPO(), 32)
    single = replace(prepared, config=replace(learning.data, samples=1))
    with pytest.raises(UserError, match=r"Rollouts\.samples is 1.*at least 2"):
        single.check_fits(learning.model, GRPO(), 32)
    beyond = replace(prepared, config=replace(learning.data, sampling=Sampling(temperature=1.0, stop_ids=(320,))))
    with pytest.raises(UserError, match=r"Sampling\.stop_ids has the id 320; this model's are from 0 to 319"):
        beyond.check_fits(learning.model, GRPO(), 32)
    with pytest.raises(UserError, match=r"Data\.batch is 8, and each prompt has 3 seq.*AllAnswers.*Data\.batch to 9"):
        replace(learning.data, samples=3)
    with pytest.raises(UserError, match=r"Rollouts\.redraws is 1, and Rollouts\.samples 1.*at least 2"):
        replace(learning.data, samples=1, redraws=1)
    with pytest.raises(UserError, match=r"Rollouts\.redraws is 1, and there are 5 prompts.*batch has 8.*to 0"):
        replace(learning.data, samples=2, redraws=1, data=replace(learning.data.data, batch=16)).prepare(silent)
    chats = Chats(seq=48, batch=8, sources=(Addition(),), tokenizer=Bpe(257))
    with pytest.raises(UserError, match=r"Rollouts\.prompts is set.*Chats.*leave it out"):
        replace(learning.data, data=chats)
    with pytest.raises(UserError, match=r"Rollouts\.data has Chats\.weights.*leave them out"):
        replace(learning.data, prompts=(), data=replace(chats, weights=(1.0,)))


def test_pairs_need_a_preference_and_chats_of_as_many_examples(comparing):
    fit = comparing.data.selection.check_objective
    for objective, data, said in (
        (GRPO(), comparing.data.data, r"Train\.objective is a GRPO.*BestAndWorst.*@DPO\(\)"),
        (DPO(pairs=3), comparing.data.data, r"Rollouts\.data is Chats with 4.*DPO\.pairs 3.*packed to at most 3"),
        (DPO(), comparing.data.data.text, r"Rollouts\.data is Data.*@Chats\(\)"),
    ):
        with pytest.raises(UserError, match=said):
            fit(objective, 3, data)
    longer = replace(comparing.data, sampling=Sampling(tokens=40, temperature=1.0))
    with pytest.raises(UserError, match=r"more than Chats\.seq / 2 \+ 1, which is 49"):
        longer.prepare(silent)
