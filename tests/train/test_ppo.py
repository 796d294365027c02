"""PPO with a critic: advantages, returns and both losses beside the papers' formulas, in a step whatever the layout."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_policy_gradient import alone, answers_of, laid_out, minimum, stepped, texts_of

from axon.errors import UserError
from axon.layout import Layout
from axon.parallel.pipeline.schedules import OneFOneB
from axon.train.policy_gradient import whitened
from axon.train.ppo import PPO, at_last, gae
from axon.train.step import Program
from axon.tune import ActorCritic


def summed(rewards, values, discount, gae_lambda):
    """Σ (γλ)^l·δ of each place of one text, as the paper writes it."""
    following = np.append(values[1:], 0)
    deltas = rewards + discount * following - values
    powers = (discount * gae_lambda) ** np.arange(len(deltas))
    return np.array([np.sum(powers[: len(deltas) - t] * deltas[t:]) for t in range(len(deltas))])


def turns_of(rng, rows, seq=20):
    """Documents of each sequence, padding at the end, and which tokens were sampled: with others between them."""
    documents, sampled = np.full((rows, seq), -1), np.zeros((rows, seq), bool)
    for row in range(rows):
        ends = np.sort(rng.choice(np.arange(2, seq), 3, replace=False))
        for number, (begin, end) in enumerate(zip([0, *ends[:2]], ends, strict=True)):
            documents[row, begin:end], sampled[row, begin:end] = number, rng.random(end - begin) < 0.6
    return documents, sampled


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 0.95), (0.9, 0.6), (1.0, 1.0), (0.8, 0.0)])
def test_advantages_are_the_papers_sum_over_the_sampled_tokens_of_each_document(discount, gae_lambda, rng):
    documents, sampled = turns_of(rng, 5)
    rewards, values = rng.normal(size=(2, *sampled.shape))
    found = gae(rewards, values, sampled, documents, discount, gae_lambda)
    assert not found[~sampled].any()
    for row in range(5):
        for number in range(3):
            own = sampled[row] & (documents[row] == number)
            expected = summed(rewards[row][own], values[row][own], discount, gae_lambda)
            np.testing.assert_allclose(found[row][own], expected, rtol=1e-9)


def answered(rng, rows=6, seq=16):
    """A batch with an answer in each sequence, but for the last, which is padding."""
    weights = np.zeros((rows, seq), np.float32)
    for row in range(rows - 1):
        begin = rng.integers(1, 5)
        weights[row, begin : begin + rng.integers(1, 9)] = 1
    documents = np.where(np.arange(rows)[:, None] < rows - 1, 0, -1) + np.zeros((rows, seq), int)
    return {"weights": weights, "documents": documents, "logprobs": -rng.uniform(0.1, 3, (rows, seq)) * weights}


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_an_answers_reward_is_at_its_last_token_and_the_divergence_at_each(kl, rng):
    batch, rewards = answered(rng), rng.normal(size=(3, 2))
    rewards[2, 1] = np.nan
    estimates = {"values": rng.normal(size=(6, 16)), "reference": -rng.uniform(0.1, 3, (6, 16))}
    learned, metrics = PPO(kl=kl, discount=0.9, gae_lambda=0.7).learned(batch, rewards, lambda _: estimates)
    sampled, advantages, returns, divergence = batch["weights"] > 0, [], [], []
    for row in range(5):
        own = sampled[row]
        values, apart = estimates["values"][row][own], (batch["logprobs"] - estimates["reference"])[row][own]
        each = -kl * apart
        each[-1] += rewards.flat[row]
        advantages += [*summed(each, values, 0.9, 0.7)]
        returns += [*summed(each, values, 0.9, 0.7) + values]
        divergence += [*apart]
        np.testing.assert_allclose(learned["values"][row][own], values, rtol=1e-6)
    expected = (np.array(advantages) - np.mean(advantages)) / np.std(advantages)
    np.testing.assert_allclose(learned["advantages"][sampled], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(learned["returns"][sampled], returns, rtol=1e-5, atol=1e-6)
    assert metrics["value_explained"] == pytest.approx(1 - np.var(advantages) / np.var(returns))
    assert metrics.get("kl", 0) == pytest.approx(np.mean(divergence) if kl else 0)
    for array in learned.values():
        assert array.dtype == np.float32
        assert not array[~sampled].any()


def test_no_answer_at_all_and_equal_advantages_have_none(rng):
    nothing = np.zeros((2, 5), bool)
    assert not whitened(rng.normal(size=(2, 5)), nothing).any()
    assert not whitened(np.full((2, 5), rng.normal()), ~nothing).any()
    assert not at_last(rng.normal(size=2), nothing).any()


@pytest.mark.parametrize("rows", [2, 6], ids=("packed", "alone"))
def test_both_losses_and_their_gradients_are_those_of_the_paper(rows, rng):
    objective, texts = PPO(clip_low=0.1, clip_high=0.2, value_clip=0.3), texts_of(rng, 6)
    with jax.enable_x64(True):
        batch = laid_out(texts, rows)
        values, old, returns = (jnp.asarray(rng.normal(size=batch["weights"].shape)) for _ in range(3))
        batch |= {"values": old, "returns": returns}

        def policy(logp):
            return jnp.sum(objective.scale(batch) * objective.token_losses(logp, batch)) / jnp.sum(batch["weights"])

        def value(values):
            return jnp.sum(batch["weights"] * objective.value_losses(values, batch)) / jnp.sum(batch["weights"])

        both = [(policy, batch["logp"]), (value, values)]
        found = jax.device_get([jax.value_and_grad(loss)(x) for loss, x in both])
        real, old, returns = (np.asarray(x) for x in (batch["weights"] > 0, old, returns))

    def clipped(values):
        near = np.clip(values, old - 0.3, old + 0.3)
        return np.maximum((values - returns) ** 2, (near - returns) ** 2)[real].mean() / 2

    def surrogate(logp):
        ratio = np.exp(logp - np.asarray(batch["logprobs"]))
        return -minimum(ratio, np.asarray(batch["advantages"]), 0.1, 0.2)[real].mean()

    for (_, x), formula, (loss, gradient) in zip(both, (surrogate, clipped), found, strict=True):
        np.testing.assert_allclose(loss, formula(np.asarray(x)), rtol=1e-6)
        for place in np.argwhere(real):
            step = np.zeros(real.shape)
            step[tuple(place)] = 1e-6
            ends = [formula(np.asarray(x) + sign * step) for sign in (1, -1)]
            np.testing.assert_allclose(gradient[tuple(place)], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-8)


# ---- in a step -------------------------------------------------------------------------------------------------------


def estimated(rng, batch):
    """The batch with old values and returns."""
    own = {name: (batch["weights"] * rng.normal(size=batch["weights"].shape)) for name in ("values", "returns")}
    return batch | {name: value.astype(np.float32) for name, value in own.items()}


def made(tiny, few, devices=1, batch=4, layout=Layout({"data": 1}), critic=None, objective=PPO(value_clip=0.5)):
    model = ActorCritic(tiny.model, critic)
    with few(devices):
        shared = {"objective": objective, "references": dict.fromkeys(objective.references, tiny.model)}
        return Program(model, layout, tiny.optimizer, batch=batch, seq=32, **shared)


NAMES = ("loss", "policy", "value", "value_clipped", "clipped", "grad_norm", "logprob_gap", "tokens")
CHANGES = {
    "alone": {"batch": 8},
    "data and tensor": {"devices": 4, "layout": Layout({"data": 2, "tensor": 2}, microbatches=2, zero=3)},
    "context": {"devices": 2, "layout": Layout({"context": 2})},
    "microbatches": {"layout": Layout({"data": 1}, microbatches=2)},
}


@pytest.mark.full
@pytest.mark.parametrize("own", [False, True], ids=("head", "model"))
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_does_not_depend_on_packing_or_the_layout(change, own, tiny, few, seed, random_parameters):
    critic, fields = replace(tiny.model, embed=16) if own else None, CHANGES[change]
    batch, found = estimated(np.random.default_rng(seed), answers_of(np.random.default_rng(seed), 4)), []
    for fields in ({}, CHANGES[change]):
        one = made(tiny, few, critic=critic, **fields)
        rows = alone(batch) if one.batch == 8 else batch
        metrics = stepped(one, np.random.default_rng(seed), random_parameters, rows)
        found.append([metrics[name] for name in NAMES])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5, atol=1e-6)
    assert found[0][2] > 0


@pytest.mark.full
def test_a_divergence_in_the_rewards_is_none_in_the_loss(tiny, few, seed, random_parameters):
    batch, found = estimated(np.random.default_rng(seed), answers_of(np.random.default_rng(seed), 4)), []
    for objective in (PPO(), PPO(kl=0.5), PPO(kl=0.5, estimator="k3")):
        metrics = stepped(made(tiny, few, objective=objective), np.random.default_rng(seed), random_parameters, batch)
        found.append((metrics["policy"], metrics.get("kl")))
    assert found[0] == found[1]
    assert found[2][0] == pytest.approx(found[0][0] + 0.5 * found[2][1])


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_a_model_without_a_critic_is_refused(tiny):
    with pytest.raises(UserError, match=r"PPO needs a model with a critic.*@ActorCritic\(\).*ActorCritic\.model"):
        Program(tiny.model, tiny.layout, tiny.optimizer, batch=4, seq=32, objective=PPO())


def test_stages_of_a_pipeline_are_refused_by_name(tiny, few):
    layout = Layout({"pipe": 2}, schedule=OneFOneB(), microbatches=2)
    with pytest.raises(UserError, match=r"Train\.objective = PPO and .*'pipe' cannot be combined: .*GRPO"):
        made(replace(tiny, model=replace(tiny.model, layers=2)), few, devices=2, layout=layout)


def test_fields_are_checked():
    for fields in ({"gae_lambda": 1.5}, {"discount": -1.0}, {"value_weight": 0.0}, {"value_clip": 0.0}):
        with pytest.raises(UserError, match=rf"PPO\.{next(iter(fields))} is"):
            PPO(**fields)
