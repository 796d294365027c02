"""Rewards by pairs with margins and ties: beside the formula of Rao and Kupper, and pair by pair in a batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.train.graded_reward import MARGINS, TIE, GradedReward
from axon.train.preference import Reward, Sides
from axon.tune.packing import Document, Example, batch_of


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def probabilities(difference, tie):
    """Of the chosen, of the other, and of neither, as in the paper: strengths eʳ, threshold θ = eᵗ."""
    one, other, theta = np.exp(difference), 1.0, np.exp(tie)
    better, worse = one / (one + theta * other), other / (other + theta * one)
    return better, worse, one * other * (theta**2 - 1) / ((one + theta * other) * (other + theta * one))


def test_loss_and_gradient_are_those_of_the_paper(rng):
    objective = GradedReward(margin=0.7, tie=float(rng.uniform(0.1, 2)), centring=0.01)
    chosen, rejected = rng.normal(size=(2, 3, 4)) * 2
    margins = np.where(rng.random((3, 4)) < 0.4, TIE, rng.uniform(0, 2, (3, 4)))
    assert np.allclose(sum(probabilities(chosen - rejected, objective.tie)), 1)

    def formula(chosen, rejected):
        tied = -np.log(probabilities(chosen - rejected, objective.tie)[2])
        better = -np.log(probabilities(chosen - rejected - 0.7 * margins, objective.tie)[0])
        return np.where(margins == TIE, tied, better) + 0.01 * (chosen + rejected) ** 2

    with jax.enable_x64(True):
        own = [jnp.asarray(one) for one in (chosen, rejected)]
        loss = lambda *both: objective.compared(Sides(*both), jnp.asarray(margins))  # noqa: E731
        found, gradient = loss(*own), jax.grad(lambda *both: jnp.sum(loss(*both)))(*own)
    np.testing.assert_allclose(found, formula(chosen, rejected), rtol=1e-9)
    ends = [formula(chosen + step, rejected) for step in (1e-6, -1e-6)]
    np.testing.assert_allclose(gradient, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_margins_are_of_the_pairs_of_a_sequence_and_a_tie_is_right_where_it_is_the_likeliest(rng):
    objective, examples = GradedReward(tie=0.8), []
    margins = rng.permutation([TIE, TIE, 0.0, 1.5, 0.3]).astype(np.float32)
    for margin in margins:
        sizes = rng.integers(3, 7, size=2)
        more = [np.zeros(size, np.float32) for size in sizes]
        for one in more:
            one[1] = margin
        documents = (
            Document(np.ones(len(one), np.int32), np.ones(len(one), np.float32), {MARGINS: one}) for one in more
        )
        examples.append(Example(tuple(documents), ""))
    batch = batch_of([examples[:2], examples[2:]], 64, "answers", {MARGINS: np.zeros((), np.float32)})
    assert batch.keys() == objective.specs(2, 64).keys()
    found = objective.margins(batch)
    real = np.asarray(objective.is_pair(batch))
    np.testing.assert_array_equal(np.asarray(found)[real], margins)
    scored = Sides(jnp.asarray(rng.normal(size=found.shape) * 3), jnp.zeros(found.shape))
    better, worse, neither = probabilities(np.asarray(scored.chosen), objective.tie)
    expected = np.where(np.asarray(found) == TIE, neither >= np.maximum(better, worse), better > worse)
    np.testing.assert_array_equal(objective.is_right(scored, batch), expected)
    plain = {name: value for name, value in batch.items() if name != MARGINS}
    np.testing.assert_array_equal(Reward().is_right(scored, plain), better > worse)


@pytest.mark.parametrize("fields", [{"tie": 0.0}, {"tie": float("nan")}, {"margin": -1.0}])
def test_a_threshold_is_above_0(fields):
    with pytest.raises(Exception, match=f"GradedReward.{next(iter(fields))}"):
        replace(GradedReward(), **fields)
