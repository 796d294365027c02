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


def test_the_second_derivatives_of_a_norm_are_those_of_its_formula(rng):
    norm, (x, along) = made(RMSNorm("embed", DIMS), rng), jnp.asarray(rng.normal(size=(2, 2, 3, 16)), jnp.float32)
    scale = norm.scale.get_value()

    def plain(x):
        return jnp.sum(jnp.sin(x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + norm.eps) * scale))

    curved = [
        jax.jvp(jax.grad(fn), (x,), (along,))[1]
        for fn in (lambda x: jnp.sum(jnp.sin(norm(x, "batch seq embed"))), plain)
    ]
    np.testing.assert_allclose(*curved, rtol=1e-4, atol=1e-4)


def test_where_its_inverse_root_is_kept_the_backward_takes_no_mean_of_squares_again(rng):
    norm, x = made(RMSNorm("embed", DIMS), rng), jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32)

    def sums(*kept):
        """Sums over an axis in the compiled loops, forward and backward, of layers whose policy keeps these."""
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        layer = jax.checkpoint(lambda x: jnp.sin(norm(x, "batch seq embed")), policy=policy, prevent_cse=False)
        layers = jax.grad(lambda x: jnp.sum(jax.lax.scan(lambda x, _: (layer(x), None), x, length=3)[0]))
        return jax.jit(layers).lower(x).compile().as_text().count(" reduce(")

    assert sums("inverse_rms") == sums() - 1
