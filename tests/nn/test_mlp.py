"""Feed-forward networks against their formulas."""

import math

import jax.numpy as jnp
import numpy as np

from axon.nn import MLP, ClampedSwiGLU, GatedMLP, gated, parameters

DIMS = {"embed": 6, "mlp": 10}


def filled(module, rng):
    values = {name: rng.normal(size=spec.shape).astype(np.float32) for name, spec in parameters(module).items()}
    for name, value in values.items():
        getattr(module, name).set_value(jnp.asarray(value))
    return values


def plain_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_the_gated_mlp_is_swiglu(rng):
    module, x = GatedMLP(DIMS), rng.normal(size=(2, 3, 6)).astype(np.float32)
    w = filled(module, rng)
    gate = x @ w["gate"]
    expected = (gate / (1 + np.exp(-gate)) * (x @ w["up"])) @ w["down"]
    np.testing.assert_allclose(module(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


def test_the_mlp_is_gpt2s_with_biases_and_the_tanh_form_of_gelu(rng):
    module, x = MLP(DIMS), rng.normal(size=(2, 3, 6)).astype(np.float32)
    w = filled(module, rng)
    up = x @ w["up"] + w["up_bias"]
    np.testing.assert_allclose(
        module(jnp.asarray(x)), plain_gelu(up) @ w["down"] + w["down_bias"], rtol=1e-4, atol=1e-4
    )


def test_the_gated_mlp_with_geglu(rng):
    module, x = GatedMLP(DIMS, activation=gated("gelu_new")), rng.normal(size=(2, 3, 6)).astype(np.float32)
    w = filled(module, rng)
    expected = (plain_gelu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
    np.testing.assert_allclose(module(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


def test_a_clamped_swiglu_is_its_formula_on_both_sides_of_its_limit(rng):
    gate, up = rng.normal(size=(2, 64)).astype(np.float32) * 3
    clamped = np.minimum(gate, 2.0)
    expected = (np.clip(up, -2.0, 2.0) + 1) * clamped / (1 + np.exp(-1.5 * clamped))
    np.testing.assert_allclose(
        ClampedSwiGLU(1.5, 2.0)(jnp.asarray(gate), jnp.asarray(up)), expected, rtol=1e-4, atol=1e-5
    )
