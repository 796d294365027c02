"""Where a runtime's functions are called and traced."""

import jax
import jax.numpy as jnp
import pytest

from axon.errors import UserError
from axon.layout import Layout
from axon.runtime import Runtime
from models.llama import Llama


@pytest.mark.parametrize("make", [lambda: jnp.asarray(3), lambda: jax.random.key(0), lambda: jnp.ones(2) + 1])
def test_an_array_that_is_made_outside_of_a_compiled_function_is_said_and_what_to_do(make):
    runtime = Runtime(Llama(64, 16, 1, 2, 2, 32), Layout({"data": 1}), devices=jax.devices()[:1])
    said = r"runtime\.tracing\(\).*Make it before.*or in a function that runtime\.jit"
    with pytest.raises(UserError, match=said), runtime.tracing():
        make()
    with pytest.raises(ValueError, match="another"), runtime.tracing():
        raise ValueError("another")
    x = jax.device_put(jnp.asarray(3.0), runtime.placement.sharding(()))
    with runtime.tracing():
        assert runtime.jit(lambda x: x + jnp.asarray(1.0))(x) == 4
