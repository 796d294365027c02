"""Policy gradients: each loss and gradient beside the paper's formula, whatever the packing and the layout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout
from axon.nn.lora import LoRA
from axon.train.adapters_off import AdaptersOff
from axon.train.policy_gradient import CISPO, DAPO, GRPO, GSPO, RLOO, DrGRPO, PolicyGradient, ReinforcePlusPlus
from axon.train.step import Program

# ---- the papers' formulas --------------------------------------------------------------------------------------------


def minimum(ratio, advantage, low, high):
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def k3(logp, reference):
    return np.exp(reference - logp) - (reference - logp) - 1


def grpo(texts, beta=0.0):
    each = [np.mean(minimum(np.exp(p - q), a, 0.2, 0.2) - beta * k3(p, r)) for p, q, r, a in texts]
    return -np.mean(each)


def dr_grpo(texts):
    return -sum(np.sum(minimum(np.exp(p - q), a, 0.2, 0.2)) for p, q, _, a in texts) / (5.0 * len(texts))


def dapo(texts):
    tokens = sum(len(p) for p, *_ in texts)
    return -sum(np.sum(minimum(np.exp(p - q), a, 0.2, 0.28)) for p, q, _, a in texts) / tokens


def rloo(texts):
    return -np.mean([a * np.sum(p) for p, _, _, a in texts])


def gspo(texts):
    return -np.mean([minimum(np.exp(np.mean(p - q)), a, 0.1, 0.2) for p, q, _, a in texts])


def weighted(texts, held=None):
    """CISPO's loss; the weights, through which no gradient goes, are those of `held`."""
    held = texts if held is None else held
    tokens = sum(len(p) for p, *_ in texts)
    weights = [np.clip(np.exp(p - q), 0, 2) for p, q, _, _ in held]
    return -sum(np.sum(w * a * p) for w, (p, _, _, a) in zip(weights, texts, strict=True)) / tokens


def with_entropy(texts, held=None):
    held = texts if held is None else held
    tokens = sum(len(p) for p, *_ in texts)
    found = [minimum(np.exp(p - q), a - 0.2 * h[0], 0.2, 0.2) for h, (p, q, _, a) in zip(held, texts, strict=True)]
    return -sum(map(np.sum, found)) / tokens


FORMULAS = {
    GRPO(): grpo,
    GRPO(kl=0.04): lambda texts: grpo(texts, beta=0.04),
    DrGRPO(constant=5.0): dr_grpo,
    DAPO(): dapo,
    RLOO(): rloo,
    GSPO(clip_low=0.1, clip_high=0.2): gspo,
    CISPO(): weighted,
    PolicyGradient(entropy=0.2): with_entropy,
}
HELD = (weighted, with_entropy)
"""Formulas with factors that are constants of the gradient."""


def texts_of(rng, count):
    """(log π, log π_sampler, log π_ref) of an answer's tokens, and its advantage.

    Log-ratios to the sampler are in hundredths: neither they nor their means are where a clip begins, as differences
    across its beginning are no derivative.
    """
    lengths = rng.integers(1, 7, count)
    ratios = [rng.normal(0, 0.3, n).round(2) for n in lengths]
    draws = [[-rng.uniform(0.1, 3, len(q)), q, rng.normal(0, 0.3, len(q)), rng.normal()] for q in ratios]
    return [(p, p + q, p + r, a) for p, q, r, a in draws]


def laid_out(texts, rows, seq=24):
    """The batch and log-probabilities of answers, after a prompt of 2 tokens each, in `rows` sequences."""
    names = ("weights", "logprobs", "advantages", "logp", "reference")
    batch = {name: np.zeros((rows, seq)) for name in names} | {"documents": np.full((rows, seq), -1)}
    at = np.zeros(rows, int)
    for number, (p, q, r, a) in enumerate(texts):
        row = number % rows
        start, end = at[row] + 2, at[row] + 2 + len(p)
        batch["documents"][row, at[row] : end] = number // rows
        for name, value in zip(names, (1, q, a, p, r), strict=True):
            batch[name][row, start:end] = value
        at[row] = end
    return {name: jnp.asarray(value) for name, value in batch.items()}


@pytest.mark.parametrize("rows", [2, 6], ids=("packed", "alone"))
@pytest.mark.parametrize("objective", FORMULAS, ids=repr)
def test_loss_and_gradient_are_those_of_the_paper(objective, rows, rng):
    texts, formula = texts_of(rng, 6), FORMULAS[objective]
    with jax.enable_x64(True):
        batch = laid_out(texts, rows)
        reference = batch["reference"] if objective.kl else None

        def loss(logp):
            losses = objective.token_losses(logp, batch, reference)
            return jnp.sum(objective.scale(batch) * losses) / objective.counts(batch)["policy"]

        found, gradient = jax.device_get(jax.value_and_grad(loss)(batch["logp"]))
        batch = jax.device_get(batch)
    np.testing.assert_allclose(found, formula(texts), rtol=1e-6)
    for number, (p, q, r, a) in enumerate(texts):
        own = gradient[number % rows][
            (batch["documents"][number % rows] == number // rows) & (batch["weights"][number % rows] > 0)
        ]
        for place in range(len(p)):
            step = 1e-6 * np.eye(len(p))[place]
            moved = [[*texts[:number], (p + sign * step, q, r, a), *texts[number + 1 :]] for sign in (1, -1)]
            kept = [texts] if formula in HELD else []
            ends = [formula(one, *kept) for one in moved]
            np.testing.assert_allclose(own[place], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-8)


ADVANTAGES = {
    "group": lambda r: [(x - np.mean(x)) / np.std(x) for x in r],
    "mean": lambda r: [x - np.mean(x) for x in r],
    "leave_one_out": lambda r: [[one - np.mean(np.delete(x, n)) for n, one in enumerate(x)] for x in r],
    "batch": lambda r: (r - np.mean(r)) / np.std(r),
}


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_advantages_are_those_of_the_paper(advantage, rng):
    rewards = rng.normal(size=(5, 4))
    objective = PolicyGradient(advantage=advantage)
    np.testing.assert_allclose(objective.advantages(rewards), ADVANTAGES[advantage](rewards), rtol=1e-9)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_an_answer_without_a_reward_has_no_part_in_the_others(advantage, rng):
    rewards, objective = rng.normal(size=(3, 5)), PolicyGradient(advantage=advantage)
    failed = np.insert(rewards, 2, np.nan, axis=1)
    found = objective.advantages(failed)
    assert not found[:, 2].any()
    np.testing.assert_allclose(np.delete(found, 2, axis=1), objective.advantages(rewards), rtol=1e-9)
    assert not objective.advantages(np.full((2, 3), np.nan)).any()


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_rewards_that_are_all_the_same_have_no_advantage(advantage, rng):
    assert not PolicyGradient(advantage=advantage).advantages(np.full((3, 7), rng.normal())).any()


def sampled_answers(rng, rewards, seq=12):
    """A batch with an answer in each sequence, none without a reward; and log-probabilities by a frozen model."""
    weights = np.zeros((rewards.size, seq), np.float32)
    for row, reward in enumerate(rewards.flat):
        begin, length = rng.integers(1, 5), rng.integers(1, 8)
        weights[row, begin : begin + length] = not np.isnan(reward)
    return {"weights": weights, "logprobs": -rng.uniform(0.1, 3, weights.shape)}, -rng.uniform(0.1, 3, weights.shape)


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("kind", [ReinforcePlusPlus, GRPO])
def test_a_tokens_advantage_loses_the_divergence_from_it_on(kind, kl, rng):
    """Of REINFORCE++ the whole is then whitened over the batch's tokens."""
    objective, rewards = kind(kl=kl, estimator="k1"), rng.normal(size=(4, 3))
    rewards[2, 1] = np.nan
    batch, frozen = sampled_answers(rng, rewards)
    learned, metrics = objective.learned(batch, rewards, lambda _: {"reference": frozen})
    of_answers = (rewards if kind is ReinforcePlusPlus else objective.advantages(rewards)).ravel()
    each, divergence = [], []
    for row, own in enumerate(batch["weights"] > 0):
        apart = (batch["logprobs"] - frozen)[row][own]
        each += [of_answers[row] - kl * np.sum(apart[place:]) for place in range(len(apart))]
        divergence += [*apart]
    each = (np.array(each) - np.mean(each)) / np.std(each) if kind is ReinforcePlusPlus else each
    np.testing.assert_allclose(learned["advantages"][batch["weights"] > 0], each, rtol=1e-5, atol=1e-6)
    assert not learned["advantages"][batch["weights"] == 0].any()
    assert metrics == (pytest.approx({"kl": np.mean(divergence)}) if kl else {})


# ---- in a step -------------------------------------------------------------------------------------------------------


def answers_of(rng, rows, seq=32, each=2, vocab=300):
    """A batch of sequences with `each` answers, whose sampler is a model of the same kind."""
    batch = {name: np.zeros((rows, seq), np.int32) for name in ("tokens", "targets", "positions")}
    batch |= {name: np.zeros((rows, seq), np.float32) for name in ("weights", "logprobs", "advantages")}
    batch["documents"] = np.full((rows, seq), -1, np.int32)
    for row in range(rows):
        at = 0
        for number in range(each):
            prompt, length = rng.integers(1, 4), rng.integers(1, 6)
            ids, own = rng.integers(1, vocab, prompt + length), (row, slice(at, at + prompt + length - 1))
            batch["tokens"][own], batch["targets"][own] = ids[:-1], ids[1:]
            batch["positions"][own], batch["documents"][own] = np.arange(len(ids) - 1), number
            learned = np.arange(1, len(ids)) >= prompt
            batch["weights"][own], batch["advantages"][own] = learned, learned * rng.normal()
            batch["logprobs"][own] = learned * (-np.log(vocab) + rng.normal(0, 0.3, len(learned)))
            at += len(learned)
    return batch


def alone(batch):
    """The same answers, each in a sequence of its own."""
    rows = []
    for row, documents in enumerate(batch["documents"]):
        for number in range(documents.max() + 1):
            own = documents == number
            rows.append({name: np.pad(array[row][own], (0, (~own).sum())) for name, array in batch.items()})
            rows[-1]["documents"] = np.where(np.arange(len(own)) < own.sum(), 0, -1).astype(np.int32)
    return {name: np.stack([one[name] for one in rows]) for name in batch}


def made(tiny, objective, few, devices=1, batch=4, **fields):
    tree = replace(tiny, objective=objective, **fields)
    with few(devices):
        return Program(
            tree.model,
            tree.layout,
            tree.optimizer,
            batch=batch,
            seq=32,
            objective=objective,
            transforms=tree.transforms,
            references={name: tree.references.get(name, tree.model) for name in objective.references},
        )


def stepped(one, rng, random_parameters, batch):
    own = random_parameters(one.runtime.module, rng)
    for name, runtime in one.references.runtimes.items():
        places = jax.tree.map(lambda x: x.sharding, runtime.abstract(one.references.specs[name]["parameters"]))
        one.references.give(name, jax.device_put(random_parameters(runtime.module, rng), places))
    _, metrics = one.step(one.init(jax.tree.map(jnp.asarray, own)), one.place(batch))
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}


NAMES = ("loss", "policy", "grad_norm", "logprob_gap", "clipped", "tokens")
OBJECTIVES = (GRPO(kl=0.1), DAPO(), GSPO(clip_low=0.1, clip_high=0.1))
CHANGES = {
    "data": {"layout": Layout({"data": 2}, zero=3)},
    "data and tensor": {"layout": Layout({"data": 2, "tensor": 2}), "devices": 4},
    "context": {"layout": Layout({"context": 2})},
    "microbatches": {"layout": Layout({"data": 1}, microbatches=2), "devices": 1},
    "both": {"layout": Layout({"data": 2, "tensor": 2}, microbatches=2), "devices": 4},
}


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda value: type(value).__name__)
def test_a_step_does_not_depend_on_the_layout(objective, change, tiny, few, seed, random_parameters):
    batch = answers_of(np.random.default_rng(seed), 4)
    fields = {"devices": 2, **CHANGES[change]}
    found = []
    for one in (made(tiny, objective, few), made(tiny, objective, few, **fields)):
        metrics = stepped(one, np.random.default_rng(seed), random_parameters, batch)
        found.append([metrics[name] for name in NAMES])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda value: type(value).__name__)
def test_a_step_does_not_depend_on_packing(objective, tiny, few, seed, random_parameters):
    batch = answers_of(np.random.default_rng(seed), 4)
    found = []
    for rows in (batch, alone(batch)):
        one = made(tiny, objective, few, batch=len(rows["tokens"]))
        metrics = stepped(one, np.random.default_rng(seed), random_parameters, rows)
        found.append([metrics[name] for name in NAMES])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5, atol=1e-6)


def test_the_gap_is_the_largest_difference_and_no_advantage_no_gradient(tiny, few, rng, random_parameters):
    batch = answers_of(rng, 4)
    batch["advantages"][:] = 0
    one = made(tiny, GRPO(), few)
    at = tuple(rng.choice(np.argwhere(batch["weights"] > 0)))
    batch["logprobs"][at] -= 500
    found = stepped(one, rng, random_parameters, batch)
    assert found["logprob_gap"] == pytest.approx(500, abs=20)
    assert found["grad_norm"] == 0
    assert not found["policy"]


@pytest.mark.full
@pytest.mark.draws(1)
def test_the_frozen_model_may_be_the_one_that_is_trained_without_its_adapters(tiny, few, rng):
    fields = {"transforms": (LoRA(rank=2),), "references": {"reference": AdaptersOff()}}
    one = made(tiny, GRPO(kl=0.5), few, **fields)
    _, metrics = one.step(one.init(), one.place(answers_of(rng, 4)))
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)  # adapters begin as no change


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_a_divergence_needs_its_frozen_model(tiny):
    with pytest.raises(UserError, match=r"GRPO needs a frozen model named 'reference'.*Train\.references"):
        Program(tiny.model, tiny.layout, tiny.optimizer, batch=4, seq=32, objective=GRPO(kl=0.1))


@pytest.mark.parametrize("objective", [GRPO(), DrGRPO(), RLOO()], ids=lambda value: type(value).__name__)
def test_a_single_answer_is_refused_where_answers_are_compared(objective):
    with pytest.raises(UserError) as error:
        objective.check_group(1, "Rollouts.samples")
    for part in ("Rollouts.samples is 1", f"{type(objective).__name__}.advantage", "at least 2"):
        assert part in str(error.value)
    ReinforcePlusPlus().check_group(1, "Rollouts.samples")


def test_fields_are_checked():
    for fields in ({"kl": -1.0}, {"clip_low": 1.5}, {"constant": 0.0}, {"answers": 0}):
        with pytest.raises(UserError, match=rf"GRPO\.{next(iter(fields))} is"):
            GRPO(**fields)
