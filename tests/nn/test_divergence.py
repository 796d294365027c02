"""Divergence from a teacher's distributions: the formula's values and gradients, on every split of the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import shard
from axon.kernels.cross_entropy import Divergence
from axon.nn import Head, Param, token_divergence

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
    one, other = (log_q, log_p) if kind.reverse else (log_p, log_q)
    return jnp.sum(jnp.exp(one) * (one - other), axis=-1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("mesh", "fields"), [(None, {}), *LAYOUTS])
def test_values_and_gradients_are_those_of_the_formula(mesh, fields, reverse, rng, placed, compiled):
    kind = Divergence(float(rng.choice([0.5, 1.0, 2.0])), reverse)
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
