"""Distillation: what is minimised beside the formula, in float64, of a teacher that is there and of one in a file."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.nn import Auxiliary, Head, Param
from axon.train.distillation import Distillation, TopDistillation
from axon.train.objective import NextToken

VOCAB, TOP = 11, 3


def of_logits(x, head):
    """A module with this last hidden state `batch seq embed` and this head `embed vocab`."""
    matrix = Param("embed vocab", {"embed": head.shape[0], "vocab": VOCAB})
    matrix.set_value(head)
    return SimpleNamespace(hidden=lambda _: (x, None, Auxiliary()), output=Head(matrix))


def kl(p, q):
    return jnp.sum(p * jnp.log(p / q), -1)


def divergence(name, p, q):
    if name == "jensen_shannon":
        return 0.3 * kl(p, 0.3 * p + 0.7 * q) + 0.7 * kl(q, 0.3 * p + 0.7 * q)
    return kl(p, q) if name == "forward" else kl(q, p)


def batch_of(rng):
    ids = {name: jnp.asarray(rng.integers(0, VOCAB, (2, 4))) for name in ("tokens", "targets")}
    places = dict.fromkeys(("positions", "documents"), jnp.zeros((2, 4), jnp.int32))
    return ids | places | {"weights": jnp.asarray(rng.integers(0, 3, (2, 4)) * 0.5)}


def softmax(logits):
    return jnp.exp(logits) / jnp.sum(jnp.exp(logits), -1, keepdims=True)


def nll(q, batch):
    return -jnp.log(jnp.take_along_axis(q, batch["targets"][..., None], -1))[..., 0]


def others_as_one(p, ids):
    picked = jnp.take_along_axis(p, ids, -1)
    return jnp.concatenate([picked, 1 - jnp.sum(picked, -1, keepdims=True)], -1)


def same(minimised, formula, *values):
    for one, other in zip(*(jax.value_and_grad(f, argnums=(0, 1))(*values) for f in (minimised, formula)), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), one, other)
        assert jax.tree.leaves(one)[0].dtype == jnp.float64


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("name", ["forward", "reverse", "jensen_shannon"])
def test_what_is_minimised_and_its_gradient_are_the_formulas_in_float64(name, rng):
    kind = {"divergence": name, "beta": 0.3 if name == "jensen_shannon" else None, "next_token": 0.4}
    with jax.enable_x64(True):
        batch = batch_of(rng)
        x, head, of_teacher, teacher = (jnp.asarray(rng.normal(size=s)) for s in ((2, 4, 5), (5, VOCAB)) * 2)
        p = softmax(of_teacher @ teacher / 2.5)
        top = jnp.argsort(-(of_teacher @ teacher), -1)[..., :TOP]
        whole = softmax(of_teacher @ teacher)
        known = {"teacher_ids": top, "teacher_logprobs": jnp.log(jnp.take_along_axis(whole, top, -1))}

        def distilled(x, head):
            objective, beside = Distillation(2.5, **kind), {"teacher": of_logits(of_teacher, teacher)}
            return objective.sums(of_logits(x, head), batch | {"teacher": of_teacher}, **beside).minimised["divergence"]

        def by_formula(x, head):
            each = 2.5**2 * divergence(name, p, softmax(x @ head / 2.5)) + 0.4 * nll(softmax(x @ head), batch)
            return jnp.sum(batch["weights"] * each)

        def of_top(x, head):
            objective = TopDistillation(TOP, **kind)
            return objective.sums(of_logits(x, head), batch | known).minimised["divergence"]

        def top_by_formula(x, head):
            q = softmax(x @ head)
            each = divergence(name, *(others_as_one(one, top) for one in (whole, q))) + 0.4 * nll(q, batch)
            return jnp.sum(batch["weights"] * each)

        same(distilled, by_formula, x, head)
        same(of_top, top_by_formula, x, head)


def test_of_the_text_itself_it_is_the_weighted_negative_log_likelihood(rng):
    with jax.enable_x64(True):
        batch, x, head = batch_of(rng), *(jnp.asarray(rng.normal(size=s)) for s in ((2, 4, 5), (5, VOCAB)))
        same(
            lambda x, head: NextToken().sums(of_logits(x, head), batch).minimised["next_token"],
            lambda x, head: jnp.sum(batch["weights"] * nll(softmax(x @ head), batch)),
            x,
            head,
        )
