"""Orthogonalisation against NumPy's singular value decomposition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.train.optimizers import newton_schulz
from axon.train.optimizers.newton_schulz import POLAR_EXPRESS

orthogonalize = jax.jit(newton_schulz.orthogonalize, static_argnums=1)


def with_singular_values(rng, s, columns):
    """A stack of one matrix: u s vᵀ with random u and v, and u vᵀ."""
    u, _, v = np.linalg.svd(rng.normal(size=(len(s), columns)), full_matrices=False)
    return np.asarray(u @ np.diag(s) @ v, np.float32)[None], u @ v


@pytest.mark.parametrize("columns", [12, 40], ids=["nearly square", "wide, by its Gram matrix"])
def test_singular_values_over_three_decades_become_one(rng, columns):
    x, expected = with_singular_values(rng, np.geomspace(3e-3, 1.0, 12) * rng.uniform(0.1, 100), columns)
    np.testing.assert_allclose(np.asarray(orthogonalize(x, 8))[0], expected, atol=2e-3)


@pytest.mark.few(steps=(1, 2, 8))
@pytest.mark.parametrize("columns", [12, 40], ids=["nearly square", "wide, by its Gram matrix"])
@pytest.mark.parametrize("steps", range(1, 9))
def test_each_step_is_the_next_polynomial_of_the_singular_values(rng, steps, columns):
    s = np.geomspace(1.0, 1e-2, 12)
    x, _ = with_singular_values(rng, s, columns)
    s = s / np.linalg.norm(s) / 1.01
    for a, b, c in POLAR_EXPRESS[:steps]:
        s = s / 1.01
        s = a * s + b * s**3 + c * s**5
    u, _, v = np.linalg.svd(np.asarray(x[0], np.float64), full_matrices=False)
    np.testing.assert_allclose(np.asarray(orthogonalize(x, steps))[0], u @ np.diag(s) @ v, atol=5e-4)


def test_each_matrix_of_a_stack_has_its_own_size_and_zeros_stay_zeros(rng):
    x = rng.normal(size=(4, 6, 9)).astype(np.float32) * np.array([1e-12, 1.0, 1e6, 0.0], np.float32)[:, None, None]
    made = np.asarray(orthogonalize(x, 8))
    for one, matrix in zip(made[:3], x[:3], strict=True):
        u, _, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
        np.testing.assert_allclose(one, u @ v, atol=1e-2)
    assert not made[3].any()


def test_bfloat16_is_orthogonal_to_its_own_precision(rng):
    x, expected = with_singular_values(rng, np.geomspace(0.1, 1.0, 16), 48)
    made = orthogonalize(x.astype(jnp.bfloat16), 5)
    assert made.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(made, np.float64)[0], expected, atol=0.1)
