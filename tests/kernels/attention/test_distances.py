"""A bias by distance: the blocked form against the formula, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    SameDocument,
    Window,
    attention,
    attention_reference,
)
from axon.kernels.attention.xla import attention_xla

QUERIES, KEYS, HEADS = 150, 180, 4


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("mask", [Everything(), Causal() & Window(70) & SameDocument()], ids=str)
def test_the_blocked_form_is_the_formula_with_gradients_whether_its_start_is_constant_or_traced(mask, rng):
    q, k, v = (rng.normal(size=(2, n, h, 8)).astype(np.float32) for n, h in ((QUERIES, HEADS), (KEYS, 2), (KEYS, 2)))
    bias = rng.normal(size=(HEADS, 2 * KEYS - 1)).astype(np.float32)
    documents = tuple(np.sort(rng.integers(0, 3, (2, n)), axis=1).astype(np.int32) for n in (QUERIES, KEYS))
    weights, config = rng.normal(size=q.shape).astype(np.float32), AttentionConfig(mask, 0.3, soft_cap=3.0)

    def run(form, start):
        def loss(q, k, v, bias):
            out, _ = form(q, k, v, config, AttentionInputs(documents, start, distance_bias=bias))
            return jnp.sum(out * weights), out

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, bias)

    @jax.jit
    def all_(traced):
        return [run(attention_xla, 30), run(attention_xla, traced), run(attention_reference, 30)]

    *found, expected = (jax.tree.leaves(one) for one in all_(30))
    for ours in found:
        for one, other in zip(ours, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_bias_of_other_distances_is_refused():
    x = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(UserError, match="distance_bias is 2 × 4; must be 2 × 7, for 2 heads"):
        attention(x, x, x, Causal(), distance_bias=jnp.zeros((2, 4)))
