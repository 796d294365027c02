"""Norms against their formulas in float64, with gradients, and in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.nn import LayerNorm, RMSNorm

DIMS = {"embed": 16}


def made(norm, rng):
    norm.scale.set_value(jnp.asarray(rng.normal(size=16), jnp.float32))
    if isinstance(norm, LayerNorm):
        norm.bias.set_value(jnp.asarray(rng.normal(size=16), jnp.float32))
    return norm


def normed(norm, x):
    return jax.jit(lambda x: norm(x, "batch seq embed"))(x)


def formula(norm, x):
    x = np.asarray(x, np.float64)
    if isinstance(norm, RMSNorm):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + norm.eps) * np.asarray(norm.scale.get_value())
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    return x * np.asarray(norm.scale.get_value()) + np.asarray(norm.bias.get_value())


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_a_norm_is_its_formula(kind, eps, rng):
    norm, x = made(kind("embed", DIMS, eps), rng), rng.normal(size=(2, 3, 16)).astype(np.float32)
    np.testing.assert_allclose(normed(norm, x), formula(norm, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_the_gradient_of_a_norm_is_that_of_its_formula(kind, rng):
    norm = made(kind("embed", DIMS), rng)
    x, along, weight = (rng.normal(size=(2, 3, 16)).astype(np.float32) for _ in range(3))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(norm(x, "batch seq embed") * weight)))(x)
    ahead, behind = (formula(norm, x.astype(np.float64) + s * along) for s in (1e-6, -1e-6))
    expected = np.sum((ahead - behind) * weight) / 2e-6
    assert abs(np.sum(np.asarray(gradient, np.float64) * along) - expected) < 1e-4 * np.linalg.norm(gradient)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_statistics_of_bf16_activations_are_made_in_float32(kind, rng):
    norm = made(kind("embed", DIMS), rng)
    x = jnp.asarray(30 + rng.normal(size=(2, 3, 16)), jnp.bfloat16)
    expected = formula(norm, x)
    found = np.asarray(normed(norm, x), np.float64)
    assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)


def test_a_zero_centered_norm_multiplies_by_one_more_than_its_scale(rng):
    plain, centered = RMSNorm("embed", DIMS), RMSNorm("embed", DIMS, zero_centered=True)
    scale, x = rng.normal(size=16).astype(np.float32), rng.normal(size=(2, 3, 16)).astype(np.float32)
    plain.scale.set_value(jnp.asarray(1 + scale))
    centered.scale.set_value(jnp.asarray(scale))
    np.testing.assert_allclose(normed(centered, x), normed(plain, x), rtol=1e-5, atol=1e-5)
    assert not centered.scale.init(jax.random.key(0), ("embed",), (16,)).any()
