"""A backward in two parts gives what it gives whole, and makes each contraction once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from axon.parallel.pipeline.equations import Equations

LAYERS, BATCH, EMBED, MLP = 3, 5, 4, 6


def chunk(weights, x):
    """Layers in an unrolled loop, each with a scale, which is no contraction, and a product that is read twice."""

    def layer(x, own):
        scale, up, down = own
        hidden = jax.nn.silu((x * scale) @ up)
        return x + (hidden * hidden) @ down, jnp.sum(hidden)

    x, sums = lax.scan(layer, x, weights, unroll=LAYERS)
    return x, jnp.sum(sums)


def given(rng):
    shapes = (LAYERS, EMBED), (LAYERS, EMBED, MLP), (LAYERS, MLP, EMBED)
    weights = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return weights, jnp.asarray(rng.normal(size=(BATCH, EMBED)), jnp.float32)


def contractions(closed):
    return sum(one.primitive.name == "dot_general" for one in closed.eqns)


@pytest.mark.parametrize(("remat", "again"), [(False, 0), (True, 2)])
def test_parts_give_the_whole_and_contract_each_once(remat, again, rng):
    weights, x = given(rng)
    out, pull = jax.vjp(jax.checkpoint(chunk) if remat else chunk, weights, x)
    leaves, tree = jax.tree.flatten((pull, out))

    def backward(*leaves):
        pull, dy = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(pull(dy))

    parts = Equations.of(backward, leaves, 3)
    dy = (jnp.asarray(rng.normal(size=x.shape), jnp.float32), jnp.asarray(rng.normal(), jnp.float32))
    leaves = jax.tree.leaves((pull, dy))
    found, left = parts.run_first(leaves)
    found |= parts.run_second(leaves, left)
    for number, expected in enumerate(jax.tree.leaves(pull(dy))):
        np.testing.assert_allclose(
            np.concatenate(found[number]) if expected.ndim else found[number][0], expected, rtol=1e-5, atol=1e-5
        )
    assert list(parts.second_gives) == [1, 2], "the scale's gradient needs no contraction, and is there at once"
    assert contractions(parts.second) == 2 * LAYERS
    assert contractions(parts.first) == (2 + again) * LAYERS - (remat and 1)  # the last output is not needed again
    assert [one.shape for one in left] == [one.shape for one in parts.types]


def test_only_an_inputs_gradient_leaves_nothing(rng):
    weights, x = given(rng)
    out, pull = jax.vjp(lambda x: chunk(weights, x), x)
    leaves, tree = jax.tree.flatten((pull, out))
    parts = Equations.of(lambda *leaves: list(_called(tree, leaves)), leaves, 0)
    assert (parts.second_gives, parts.types) == ({}, [])


def _called(tree, leaves):
    pull, dy = jax.tree.unflatten(tree, leaves)
    return pull(dy)


def test_what_waits_is_in_the_form_that_takes_least_and_what_is_at_hand_does_not_wait(rng):
    """A backward reads a sum in float32, stacked and transposed, and the input: the sum alone waits, in bfloat16."""
    x = jnp.asarray(rng.normal(size=(BATCH, EMBED)), jnp.bfloat16)

    def forward(x):
        total = jnp.sin(x) + x
        wide = total.astype(jnp.float32)
        return wide * wide, wide[None], x[None].astype(jnp.float32), total.T, wide.reshape(-1)

    parts = Equations.of(lambda x: list(forward(x)), [x], until=1)
    found, waits = parts.run_first([x])
    assert list(found) == [0]
    assert [(one.shape, one.dtype) for one in waits] == [(x.shape, x.dtype)]
    found |= parts.run_second([x], waits)
    for number, expected in enumerate(forward(x)):
        np.testing.assert_allclose(found[number][0].astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2)
