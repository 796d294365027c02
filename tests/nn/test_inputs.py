"""Inputs: what a layer is given."""

import jax
import jax.numpy as jnp

from axon.nn import Inputs


def test_each_layer_has_a_key_of_its_own_and_the_rest_in_common(seed):
    tokens = jnp.zeros((1, 2), jnp.int32)
    inputs = Inputs(tokens, tokens, key=jax.random.key(seed), rows=jnp.zeros(1, jnp.int32))
    one, other = inputs.in_layer(0), inputs.in_layer(1)
    assert one.tokens is other.tokens is tokens
    keys = {tuple(jax.random.key_data(i.key).tolist()) for i in (inputs, one, other)}
    assert len(keys) == 3


def test_without_a_key_nothing_changes():
    inputs = Inputs(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2), jnp.int32))
    assert inputs.in_layer(3) is inputs
