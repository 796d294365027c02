"""The router: which experts it chooses, what its losses are by their formulas, and what its bias does to the load."""

from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

from axon.errors import UserError
from axon.nn import Param, Routing
from axon.nn.router import Router, Variable

DIMS = {"embed": 6, "experts": 8}
BATCH, SEQ = 3, 5


@cache
def compiled(routing):
    """run(matrix, variables, x, real), and variables of zeros."""
    graph, _, variables = nnx.split(Router(DIMS, routing), Param, Variable)
    zeros = {name: np.zeros(v.get_value().shape, np.float32) for (name,), v in nnx.to_flat_state(variables)}
    run = jax.jit(lambda matrix, variables, *given: nnx.merge(graph, {"matrix": matrix}, variables)(*given))
    return lambda *given: jax.device_get(run(*given)), zeros


def route(routing, rng, state=None):
    """Logits, tokens that are real, and what the router gives."""
    run, zeros = compiled(routing)
    matrix = rng.normal(size=(6, 8)).astype(np.float32)
    x = rng.normal(size=(BATCH, SEQ, 6)).astype(np.float32)
    real = np.arange(SEQ) < np.array([[SEQ], [SEQ - 2], [1]])
    routed, auxiliary = run(matrix, zeros | (state or {}), x, real)
    return (x @ matrix).astype(np.float64), real, routed, auxiliary


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def test_the_chosen_have_the_largest_scores_and_their_weights(rng):
    for scores, of in (("softmax", softmax), ("sigmoid", lambda x: 1 / (1 + np.exp(-x)))):
        for normalise in (True, False):
            logits, real, routed, _ = route(Routing(8, 3, scores, normalise=normalise, scale=2.5), rng)
            expected = np.argsort(-logits, axis=-1)[..., :3]
            np.testing.assert_array_equal(routed.chosen, np.where(real[..., None], expected, -1))
            weights = np.take_along_axis(of(logits), expected, -1)
            weights = 2.5 * (weights / weights.sum(-1, keepdims=True) if normalise else weights)
            np.testing.assert_allclose(routed.weights, weights, rtol=1e-4)


def test_groups_are_kept_by_the_sum_of_their_best(rng):
    for group_best in (1, 2):
        routing = Routing(8, 2, "sigmoid", groups=2, kept_groups=1, group_best=group_best)
        logits, real, routed, _ = route(routing, rng)
        scores = np.sort((1 / (1 + np.exp(-logits))).reshape(BATCH, SEQ, 2, 4))
        kept = np.argmax(scores[..., -group_best:].sum(-1), axis=-1)
        allowed = np.arange(8) // 4 == kept[..., None]
        expected = np.argsort(-np.where(allowed, logits, -np.inf), axis=-1)[..., :2]
        np.testing.assert_array_equal(np.asarray(routed.chosen)[real], expected[real])


def test_losses_are_their_formulas_over_real_tokens(rng):
    routing = Routing(8, 2, sequence_loss=0.5, global_loss=0.25, z_loss=0.125)
    before = rng.uniform(1, 5, 8).astype(np.float32)
    logits, real, routed, auxiliary = route(routing, rng, {"load": before})
    shares, chosen = softmax(logits), np.asarray(routed.chosen)
    balance = 0
    for sequence in range(BATCH):
        own = real[sequence]
        loads = np.bincount(chosen[sequence][own].reshape(-1), minlength=8) / (own.sum() * 2)
        balance += own.sum() * 8 * np.sum(loads * shares[sequence][own].mean(0))
    np.testing.assert_allclose(auxiliary.losses["balance"], 0.5 * balance, rtol=1e-4)
    expected = 0.25 * 8 * np.sum(shares[real] * before / before.sum())
    np.testing.assert_allclose(auxiliary.losses["global_balance"], expected, rtol=1e-4)
    partition = np.log(np.exp(logits).sum(-1))[real]
    np.testing.assert_allclose(auxiliary.losses["router_z"], 0.125 * np.sum(partition**2), rtol=1e-4)
    np.testing.assert_array_equal(auxiliary.statistics["load"], np.bincount(chosen[real].reshape(-1), minlength=8))


def test_even_scores_of_an_even_load_cost_the_weight_of_the_loss_for_each_token():
    run, zeros = compiled(Routing(8, 8, sequence_loss=0.5))
    _, auxiliary = run(np.zeros((6, 8), np.float32), zeros, np.ones((BATCH, SEQ, 6)), np.ones((BATCH, SEQ), bool))
    np.testing.assert_allclose(auxiliary.losses["balance"], 0.5 * BATCH * SEQ, rtol=1e-5)


def test_the_bias_moves_load_from_the_experts_that_have_most_to_those_that_have_least(rng):
    """Up by the rate below the mean load, down above it; it takes part in the choice, and in no weight."""
    routing, most = Routing(8, 2, bias_rate=0.05), []
    bias = np.eye(8, dtype=np.float32)[0]  # at first every token chooses expert 0
    update = Router(DIMS, routing).bias.get_metadata()["update"]
    seed = rng.integers(2**31)
    for _ in range(60):
        logits, real, routed, auxiliary = route(routing, np.random.default_rng(seed), {"bias": bias})
        load = np.asarray(auxiliary.statistics["bias"])
        np.testing.assert_array_equal(update(bias, load), bias + np.float32(0.05) * np.sign(load.mean() - load))
        bias = np.asarray(update(bias, load))
        most.append(load.max())
        own = np.take_along_axis(softmax(logits)[real], np.asarray(routed.chosen)[real], -1)
        np.testing.assert_allclose(np.asarray(routed.weights)[real], own / own.sum(-1, keepdims=True), rtol=1e-4)
    assert most[0] == real.sum() > most[-1]


def test_an_expert_takes_the_first_tokens_of_each_sequence_up_to_its_capacity(rng):
    routing = Routing(8, 2, capacity=0.6)
    assert routing.places(SEQ) == 1
    logits, real, routed, auxiliary = route(routing, rng)
    wanted, dropped = np.argsort(-logits, axis=-1)[..., :2], 0
    for sequence in range(BATCH):
        taken = set()
        for token in np.flatnonzero(real[sequence]):
            for k, expert in enumerate(wanted[sequence, token]):
                assert routed.chosen[sequence, token, k] == (-1 if expert in taken else expert)
                dropped += expert in taken
            taken.update(wanted[sequence, token])
    assert auxiliary.statistics["dropped"] == dropped


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 9}, "Routing.top_k is 9, and there are 8 experts"),
        ({"capacity": 0.0}, "Routing.capacity is 0.0; must be above 0"),
        ({"capacity": 1e30}, "Routing.capacity is 1e+30, and from 4 on, experts over top_k, no token loses an expert"),
        ({"capacity": 4}, "Routing.capacity is 4"),
        ({"groups": 3}, "Routing.groups: 8 experts do not divide into 3 groups"),
        ({"groups": 2, "kept_groups": 3}, "Routing.kept_groups is 3, of 2 groups"),
        ({"groups": 8, "kept_groups": 1}, "Routing.top_k is 2, and 1 of 8 groups have 1 experts: raise kept_groups"),
        ({"group_best": 0}, "Routing.group_best is 0; must be at least 1"),
        ({"scores": "softmaks"}, "Routing.scores is 'softmaks', which is unknown. Did you mean 'softmax'"),
        ({"bias_rate": -1.0}, "Routing.bias_rate is -1.0; must be at least 0"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(fields, message):
    with pytest.raises(UserError) as caught:
        Routing(**{"experts": 8, "top_k": 2} | fields)
    assert message in str(caught.value)
