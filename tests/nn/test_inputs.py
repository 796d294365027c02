"""Inputs: what a layer is given."""

import jax
import jax.numpy as jnp
import numpy as np

from axon.nn import Inputs, Rope


def test_each_layer_has_a_key_of_its_own_and_the_rest_in_common(seed):
    tokens = jnp.zeros((1, 2), jnp.int32)
    inputs = Inputs(tokens, tokens, key=jax.random.key(seed), sequences=jnp.zeros(1, jnp.int32))
    one, other = inputs.in_layer(0), inputs.in_layer(1)
    assert one.tokens is other.tokens is tokens
    keys = {tuple(jax.random.key_data(i.key).tolist()) for i in (inputs, one, other)}
    assert len(keys) == 3


def test_without_a_key_nothing_changes():
    inputs = Inputs(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2), jnp.int32))
    assert inputs.in_layer(3) is inputs


def test_angles_computed_before_the_layers_are_those_that_a_layer_would_compute(rng):
    positions = jnp.asarray(rng.integers(0, 99, (2, 3)), jnp.int32)
    plain = Inputs(positions, positions)
    ropes = [(Rope(100.0), 8), (Rope(), 8), (Rope(), 4), (Rope(), 8)]
    ready = plain.with_angles(ropes)
    assert len(ready.angles) == 3
    for one in ropes:
        found = ready.angles_of(*one)
        assert any(found is a for a in ready.angles)
        np.testing.assert_array_equal(found.cos, plain.angles_of(*one).cos)
        np.testing.assert_array_equal(found.sin, plain.angles_of(*one).sin)
