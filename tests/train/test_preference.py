"""Objectives of preferences: each loss and gradient beside the paper's formula, whatever the packing and the layout."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Auxiliary
from axon.nn.lora import LoRA
from axon.train.adapters_off import AdaptersOff
from axon.train.preference import CPO, DPO, IPO, ORPO, Answers, Reward, Sides, SimPO
from axon.train.step import Program
from axon.tune import RewardModel
from axon.tune.packing import Document, Example, batch_of


def log_sigmoid(x):
    return -jnp.logaddexp(0.0, -x)


def log_odds(m):
    return m - jnp.log1p(-jnp.exp(m))


# The paper's loss of a pair: log-probabilities, numbers of tokens, and log-probabilities by the reference.
FORMULAS = {
    DPO(beta=0.3): lambda c, r, n, m, u, v: -log_sigmoid(0.3 * (c - u - r + v)),
    DPO(beta=0.3, smoothing=0.2): lambda c, r, n, m, u, v: (
        -0.8 * log_sigmoid(0.3 * (c - u - r + v)) - 0.2 * log_sigmoid(-0.3 * (c - u - r + v))
    ),
    IPO(beta=0.4): lambda c, r, n, m, u, v: (c - u - r + v - 1 / 0.8) ** 2,
    SimPO(beta=2.0, gamma=0.7): lambda c, r, n, m, u, v: -log_sigmoid(2 * c / n - 2 * r / m - 0.7),
    ORPO(weight=0.3): lambda c, r, n, m, u, v: -c / n - 0.3 * log_sigmoid(log_odds(c / n) - log_odds(r / m)),
    CPO(beta=0.2, weight=0.6): lambda c, r, n, m, u, v: -log_sigmoid(0.2 * (c - r)) - 0.6 * c,
}


@pytest.mark.parametrize("objective", FORMULAS, ids=repr)
def test_loss_and_gradient_are_those_of_the_paper(objective, rng):
    shape = 3, 4
    logp, beside = (-rng.uniform(0.5, 9, (2, *shape)) for _ in range(2))
    tokens = rng.integers(1, 7, (2, *shape)).astype(float)

    def loss(chosen, rejected):
        answers = Answers(Sides(chosen, rejected), Sides(*map(jnp.asarray, tokens)), Sides(*map(jnp.asarray, beside)))
        return objective.compared(answers)[0]

    def by_formula(chosen, rejected):
        return FORMULAS[objective](chosen, rejected, *tokens, *beside)

    with jax.enable_x64(True):
        same_in_float64(loss, by_formula, *map(jnp.asarray, logp))


def same_in_float64(loss, formula, *values):
    """The losses are the formula's in float64, and so are the gradients of their sum."""
    found, expected = (
        (one(*values), jax.grad(lambda *x, one=one: jnp.sum(one(*x)), argnums=tuple(range(len(values))))(*values))
        for one in (loss, formula)
    )
    for value, exact in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert value.dtype == jnp.float64
        np.testing.assert_allclose(value, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("margin", [0.0, 0.4])
@pytest.mark.parametrize("centring", [0.0, 0.05])
def test_a_rewards_loss_and_gradient_are_bradley_terrys_with_margin_and_centring(margin, centring, rng):
    objective = Reward(pairs=3, margin=margin, centring=centring)
    batch = batch_of([pairs_of(rng, 3), pairs_of(rng, 2)], 48, "answers")
    x, score = rng.normal(size=(2, 48, 5)), rng.normal(size=5)
    ends = [
        [np.flatnonzero(batch["answers"][row] == 2 * pair + side)[-1] for side in (0, 1)]
        for row, pair in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    ]

    def loss(x, score):
        module = SimpleNamespace(hidden=lambda _: (x, None, Auxiliary()), score=score)
        sums = objective.sums(module, batch)
        assert objective.counts(batch)["preference"] == 5
        return sums.minimised["preference"]

    def formula(x, score):
        scores = jnp.stack([x[number // 3, jnp.array(end)] @ score for number, end in enumerate(ends)])
        chosen, rejected = scores.T
        return jnp.sum(-log_sigmoid(chosen - rejected - margin) + centring * (chosen + rejected) ** 2)

    with jax.enable_x64(True):
        same_in_float64(loss, formula, jnp.asarray(x), jnp.asarray(score))


def pairs_of(rng, count, vocab=300):
    """Examples of a chosen and a rejected text with a prompt in common."""
    found = []
    for _ in range(count):
        prompt = rng.integers(1, vocab, rng.integers(1, 4))
        texts = [np.concatenate([prompt, rng.integers(1, vocab, rng.integers(1, 4))]) for _ in range(2)]
        learned = [np.arange(len(text) + 1) >= len(prompt) for text in texts]
        for mask in learned:
            mask[-1] = False
        documents = [Document(np.append(text, text[-1]), mask) for text, mask in zip(texts, learned, strict=True)]
        found.append(Example(tuple(documents), ""))
    return found


def rows_of(examples, each, rows):
    packed = [examples[start : start + each] for start in range(0, len(examples), each)]
    return batch_of([*packed, *[[] for _ in range(rows - len(packed))]], 32, "answers")


def made(tiny, objective, few, devices=1, **fields):
    tree = replace(tiny, objective=objective, **fields)
    with few(devices):
        references = {"reference": tree.references.get("reference", tree.model)}
        return Program(
            tree.model,
            tree.layout,
            tree.optimizer,
            batch=8,
            seq=32,
            objective=objective,
            transforms=tree.transforms,
            references=references if objective.references else {},
        )


def given(one, rng, random_parameters):
    """Its parameters, drawn, and those of its frozen model, other ones."""
    own = random_parameters(one.runtime.module, rng)
    for name, runtime in one.references.runtimes.items():
        drawn = random_parameters(runtime.module, rng)
        one.references.give(
            name,
            jax.device_put(
                drawn, jax.tree.map(lambda x: x.sharding, runtime.abstract(one.references.specs[name]["parameters"]))
            ),
        )
    return one.init(jax.tree.map(jnp.asarray, own))


def stepped(one, state, batch):
    _, metrics = one.step(state, one.place(batch))
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}


NAMES = ("loss", "grad_norm", "accuracy", "margin", "chosen", "rejected", "tokens")
OBJECTIVES = (DPO(beta=0.3), ORPO(), Reward(margin=0.1, centring=0.02))


def model_for(tiny, objective):
    return RewardModel(tiny.model) if isinstance(objective, Reward) else tiny.model


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda one: type(one).__name__)
def test_a_step_does_not_depend_on_packing_microbatches_or_layout(objective, tiny, few, random_parameters, seed):
    tiny = replace(tiny, model=model_for(tiny, objective))
    changes = [
        ({}, 1, 1),
        ({}, 1, 2),
        ({"layout": Layout({"data": 1}, microbatches=4)}, 1, 1),
        ({"layout": Layout({"data": 2, "tensor": 2}, zero=3)}, 4, 2),
    ]
    found = []
    for fields, devices, each in changes:
        one, rng = made(tiny, objective, few, devices, **fields), np.random.default_rng(seed)
        state = given(one, rng, random_parameters)
        found.append(stepped(one, state, rows_of(pairs_of(rng, 8), each, 8)))
    for other in found[1:]:
        np.testing.assert_allclose(
            [other[name] for name in NAMES], [found[0][name] for name in NAMES], rtol=1e-5, atol=1e-6
        )


@pytest.mark.few(adapted=(True,))
@pytest.mark.parametrize("adapted", [False, True])
def test_a_policy_that_is_the_reference_has_a_loss_of_log_2_and_adapters_that_moved_are_off(adapted, tiny, few, rng):
    fields = {"transforms": (LoRA(rank=4),), "references": {"reference": AdaptersOff()}} if adapted else {}
    one = made(tiny, DPO(), few, **fields)
    state = one.init()
    if not adapted:
        one.references.give("reference", jax.tree.map(jnp.copy, state.parameters))
    batch = rows_of(pairs_of(rng, 8), 1, 8)
    state, first = one.step(state, one.place(batch))
    np.testing.assert_allclose(float(first["loss"]), math.log(2), rtol=1e-6)
    assert float(first["margin"]) == pytest.approx(0, abs=1e-6)
    for _ in range(3):
        state, later = one.step(state, one.place(batch))
    assert float(later["loss"]) < math.log(2) - 1e-3


def test_a_score_is_read_at_the_last_token_of_each_answer(tiny, few, random_parameters, rng):
    objective = Reward()
    one = made(replace(tiny, model=RewardModel(tiny.model)), objective, few)
    state, examples = given(one, rng, random_parameters), pairs_of(rng, 4)

    def scores(parameters, batch):
        module = one.runtime.bind(parameters)
        x, _ = objective.hidden(module, batch)
        return x @ module.score.get_value()

    batch = one.place(rows_of(examples, 2, 8))
    with one.runtime.tracing():
        each = np.asarray(one.runtime.jit(scores)(state.parameters, batch))
        found = jax.device_get(one.evaluator(state.parameters, batch, {}))
    differences = []
    for row in range(2):
        for pair in range(2):
            last = [np.flatnonzero(np.asarray(batch["answers"])[row] == 2 * pair + side)[-1] for side in (0, 1)]
            differences.append(each[row, last[0]] - each[row, last[1]])
    np.testing.assert_allclose(found["margin"][0], sum(differences), rtol=1e-5)
    np.testing.assert_allclose(found["loss"][0], -sum(map(log_sigmoid, differences)), rtol=1e-5)
    assert found["accuracy"] == (sum(one > 0 for one in differences), 4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ("Train.references['reference']", "Train.transforms", "LoRA")),
        ({"transforms": (LoRA(rank=4, others="norm/*"),)}, ("AdaptersOff", "LoRA.others", "Reference()")),
    ],
)
def test_adapters_are_off_where_they_alone_are_trained(fields, said, tiny, few):
    with pytest.raises(UserError) as error:
        made(tiny, DPO(), few, references={"reference": AdaptersOff()}, **fields)
    for part in said:
        assert part in str(error.value)


def test_a_reward_needs_a_model_that_scores(tiny, few):
    with pytest.raises(UserError, match=r"Reward needs .* LanguageModel .*RewardModel"):
        made(tiny, Reward(), few)
