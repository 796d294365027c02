"""A mean of squares that is handed on is taken once, and is what a norm would have computed, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon.nn import Auxiliary, Depth, Inputs, RMSNorm, Segment, mean_square

DIMS = {"embed": 16}


class Block(nnx.Module):
    """A norm, and a bend."""

    def __init__(self):
        self.norm = RMSNorm("embed", DIMS)

    def __call__(self, x, inputs, cache=None):
        return x + jnp.sin(self.norm(x, "batch seq embed")), cache, Auxiliary()


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32)


def test_what_is_handed_on_stands_for_this_array_alone_and_over_its_last_axis_alone(x):
    other, told = x + 0, jnp.full((2, 3, 1), 7.0)
    with mean_square.mean_square_taken(x, told):
        np.testing.assert_array_equal(mean_square.mean_square(x), told)
        np.testing.assert_allclose(mean_square.mean_square(other), np.mean(np.square(x), -1, keepdims=True), rtol=1e-6)
        assert mean_square.mean_square(x, (-2, -1)).shape == (2, 1, 1)
    np.testing.assert_allclose(mean_square.mean_square(x), np.mean(np.square(x), -1, keepdims=True), rtol=1e-6)


def test_its_derivatives_are_those_of_the_mean_of_squares(x, rng):
    weight, along = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 3, 1), x.shape))

    def told(x):
        with mean_square.mean_square_taken(x, mean_square.take_mean_square(x)):
            return jnp.sum(jnp.tanh(weight * mean_square.mean_square(x)))

    def plain(x):
        return jnp.sum(jnp.tanh(weight * jnp.mean(x * x, -1, keepdims=True)))

    np.testing.assert_allclose(jax.jit(jax.grad(told))(x), jax.grad(plain)(x), rtol=1e-5, atol=1e-6)
    curved = [jax.jvp(jax.grad(fn), (x,), (along,))[1] for fn in (told, plain)]
    np.testing.assert_allclose(*curved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "full", ("inverse_rms",)])
@pytest.mark.parametrize("unroll", [True, False])
def test_each_layer_is_told_the_mean_of_squares_of_its_own_input(x, rng, unroll, remat, monkeypatch, executed):
    model, told = Depth(Segment(3, block=Block())), []
    model.block.norm.scale.set_value(jnp.asarray(rng.normal(size=(3, 16)), jnp.float32))
    graph, state = nnx.split(model)
    inputs = Inputs(jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32))

    def seen(wide, mean):
        jax.debug.callback(lambda *both: told.append(both), wide, mean)
        return mean

    def run(state, x):
        return jnp.sum(jnp.tanh(nnx.merge(graph, state)(x, inputs)[0]))

    def plain(state, x):
        for scale in jax.tree.leaves(state)[0]:
            x = x + jnp.sin(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale)
        return jnp.sum(jnp.tanh(x))

    with executed(remat=remat, unroll=unroll):
        found, expected = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(state, x) for fn in (run, plain))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
        monkeypatch.setattr(mean_square, "_is_mean_square", seen)
        jax.jit(lambda state, x: run(state, x))(state, x).block_until_ready()
    jax.effects_barrier()
    assert len(told) == 3
    for wide, mean in told:
        np.testing.assert_allclose(mean, np.mean(np.square(wide), -1, keepdims=True), rtol=1e-5)
