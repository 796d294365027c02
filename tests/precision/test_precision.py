"""The dtype policy."""

import jax.numpy as jnp
import pytest

from axon.precision import Precision


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")])
def test_auto_is_float32_on_cpu_and_bfloat16_on_accelerators(platform, dtype):
    assert Precision().compute_dtype(platform) == jnp.dtype(dtype)


def test_what_is_said_holds_on_every_platform_and_gradients_are_float32_unless_said():
    assert Precision("bfloat16").compute_dtype("cpu") == jnp.bfloat16
    assert Precision().reduce_dtype == jnp.float32
    assert Precision(reduce="bfloat16").reduce_dtype == jnp.bfloat16
