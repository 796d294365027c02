"""Divergence from a teacher's distributions: the formula's values and gradients, on every split of the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import shard
from axon.kernels.cross_entropy import (
    Columns,
    Divergence,
    HeadTeacher,
    Side,
    TopTeacher,
    token_divergence_gradients,
)
from axon.kernels.cross_entropy import token_divergence as token_divergence_kernel
from axon.nn import Head, Param, token_divergence, top_divergence

SIZES, VOCAB = {"embed": 8, "vocab": 32}, 29
LAYOUTS = [
    ({"tensor": 4}, {}),
    ({"data": 4}, {"zero": 3}),
    ({"data": 2, "context": 2, "tensor": 2}, {}),
]


def head_of(value, names, soft_cap, embed):
    matrix = Param(names, SIZES | {"embed": embed})
    matrix.set_value(value)
    return Head(matrix, VOCAB, soft_cap)


def by_formula(x, head, teacher_x, teacher, kind, caps):
    def log_probabilities(x, head, cap):
        logits = (x @ head)[..., :VOCAB]
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return jax.nn.log_softmax(logits / kind.temperature)

    log_q, log_p = log_probabilities(x, head, caps[0]), log_probabilities(teacher_x, teacher, caps[1])

    def kl(one, other):
        return jnp.sum(jnp.exp(one) * (one - other), axis=-1)

    if (beta := kind.beta) in (0, 1):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    mixture = jnp.log(beta * jnp.exp(log_p) + (1 - beta) * jnp.exp(log_q))
    return beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)


@pytest.mark.few(mesh=(None,))
@pytest.mark.few(beta=(0.3,))
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.3])
@pytest.mark.parametrize(("mesh", "fields"), [(None, {}), *LAYOUTS])
def test_values_and_gradients_are_those_of_the_formula(mesh, fields, beta, rng, placed, compiled):
    kind = Divergence(float(rng.choice([0.5, 1.0, 2.0])), beta)
    names, caps = rng.choice(["embed vocab", "vocab embed"], 2), [rng.choice([None, 1.5]) for _ in range(2)]
    print(kind, names, caps)
    x, teacher_x = rng.normal(size=(4, 8, 8)), rng.normal(size=(4, 8, 6))
    head, teacher = 0.3 * rng.normal(size=(8, 32)), 0.3 * rng.normal(size=(6, 32))
    x, teacher_x, head, teacher, ct = (
        jnp.asarray(v, jnp.float32) for v in (x, teacher_x, head, teacher, rng.normal(size=(4, 8)))
    )

    def ours(x, head, teacher_x, teacher):
        own, theirs = (m if n == "embed vocab" else m.T for m, n in zip((head, teacher), names, strict=True))
        x, teacher_x = shard(x, "batch seq embed"), shard(teacher_x, "batch seq embed")
        sides = head_of(own, names[0], caps[0], 8), head_of(theirs, names[1], caps[1], 6)
        return token_divergence(x, sides[0], teacher_x, sides[1], kind)

    def value_and_gradients(function):
        def run(x, head, teacher_x, teacher, ct):
            found, backward = jax.vjp(lambda x, head: function(x, head, teacher_x, teacher), x, head)
            return found, backward(ct)

        return run

    expected = value_and_gradients(lambda x, h, tx, t: by_formula(x, h, tx, t, kind, caps))
    run = value_and_gradients(ours)
    given = x, head, teacher_x, teacher, ct
    found = jax.jit(run)(*given) if mesh is None else compiled(placed(mesh, **fields), run, *given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected(*given))


@pytest.mark.few(mesh=(LAYOUTS[2][0],))
@pytest.mark.few(beta=(0.6,))
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.6])
@pytest.mark.parametrize(("mesh", "fields"), LAYOUTS)
def test_ids_that_a_teacher_does_not_name_are_one_outcome(mesh, fields, beta, rng, placed, compiled):
    """The divergence of top + 1 outcomes, with its gradients, where the vocabulary is split too."""
    kind, top = Divergence(1.0, beta), int(rng.choice([1, 3, 8]))
    x, head, ct = (np.float32(rng.normal(size=size)) for size in ((4, 8, 8), (8, 32), (4, 8)))
    logprobs = rng.normal(size=(4, 8, VOCAB))
    logprobs -= np.logaddexp.reduce(logprobs, axis=-1, keepdims=True)
    ids = np.argsort(-logprobs, axis=-1)[..., :top].astype(np.int32)
    logprobs = np.float32(np.take_along_axis(logprobs, ids, -1))

    def ours(x, head, ids, logprobs):
        x = shard(x, "batch seq embed")
        return top_divergence(x, head_of(head, "embed vocab", None, 8), ids, logprobs, kind)

    def formula(x, head, ids, logprobs):
        q = jax.nn.softmax((x @ head)[..., :VOCAB])
        q, p = jnp.take_along_axis(q, ids, -1), jnp.exp(logprobs)
        q, p = (jnp.concatenate([one, 1 - one.sum(-1, keepdims=True)], -1) for one in (q, p))
        log_q, log_p = jnp.log(q), jnp.log(p)
        m = jnp.log((beta or 1.0) * p + (1 - beta) * q) if 0 < beta < 1 else None
        if m is None:
            return jnp.sum(q * (log_q - log_p) if beta else p * (log_p - log_q), -1)
        return jnp.sum(beta * p * (log_p - m) + (1 - beta) * q * (log_q - m), -1)

    def value_and_gradients(function):
        def run(x, head, ids, logprobs, ct):
            found, backward = jax.vjp(lambda x, head: function(x, head, ids, logprobs), x, head)
            return found, backward(ct)

        return run

    given = x, head, ids, logprobs, ct
    found = compiled(placed(mesh, **fields), value_and_gradients(ours), *map(jnp.asarray, given))
    with jax.enable_x64(True):  # 1 - Σ q of the likeliest loses digits
        wide = [jnp.asarray(one, jnp.float64 if one.dtype == np.float32 else one.dtype) for one in given]
        expected = value_and_gradients(formula)(*wide)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)


def exact_divergence(log_q, log_p, beta):
    """By its formula, of log-probabilities."""
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    if beta in (0, 1):
        return jnp.sum(q * (log_q - log_p) if beta else p * (log_p - log_q), -1)
    log_m = jnp.log(beta * p + (1 - beta) * q)
    return jnp.sum(beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m), -1)


def as_outcomes(log_q, ids):
    """The log-probabilities of some ids, and of all others as one outcome."""
    picked = jnp.take_along_axis(log_q, ids, -1)
    return jnp.concatenate([picked, jnp.log1p(-jnp.sum(jnp.exp(picked), -1, keepdims=True))], -1)


@pytest.mark.parametrize("beta", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("named", [None, 4], ids=["a teacher's head", "its likeliest ids"])
def test_in_float64_values_and_gradients_are_the_formulas(named, beta, rng):
    kind = Divergence(1.0 if named else float(rng.uniform(0.5, 3)), beta)
    x, head, teacher_x, teacher_head = (rng.normal(size=size) for size in ((9, 5), (5, 32), (9, 3), (3, 32)))
    ct = rng.normal(size=9)
    with jax.enable_x64(True):
        x, head, teacher_x, teacher_head, ct = map(jnp.asarray, (x, head, teacher_x, teacher_head, ct))
        log_p = jax.nn.log_softmax((teacher_x @ teacher_head)[:, :VOCAB] / kind.temperature)
        ids = jnp.argsort(-log_p, -1)[:, :named].astype(jnp.int32)
        student = Side(x, head, Columns(VOCAB))
        top = TopTeacher(ids, jnp.take_along_axis(log_p, ids, -1), student.columns)
        teacher = top if named else HeadTeacher(Side(teacher_x, teacher_head, student.columns))
        found = token_divergence_kernel(student, teacher, kind)
        gradients = token_divergence_gradients(student, teacher, kind, found, ct, jnp.float64)

        def formula(x, head):
            log_q = jax.nn.log_softmax((x @ head)[:, :VOCAB] / kind.temperature)
            both = [as_outcomes(one, ids) for one in (log_q, log_p)] if named else (log_q, log_p)
            return exact_divergence(*both, beta)

        expected, backward = jax.vjp(formula, x, head)
        for value, exact in zip((found.divergence, *gradients), (expected, *backward(ct)), strict=True):
            assert value.dtype == jnp.float64
            np.testing.assert_allclose(value, exact, rtol=1e-8, atol=1e-10)
