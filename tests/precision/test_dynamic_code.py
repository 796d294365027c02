"""The dynamic code beside the numbers of its paper (arXiv:2110.02861, section 2)."""

import jax
import numpy as np
import pytest

from axon.precision.dynamic_code import Blocks, decoded, encoded


def numbers(signed: bool) -> np.ndarray:
    """0, 1, and the middles of even steps from a tenth to the whole of each of seven decades."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        middles = 10.0 ** (i - 6) * (edges[1:] + edges[:-1]) / 2
        found += [*middles, *(-middles if signed else ())]
    return np.sort(found)


@pytest.fixture
def wide(rng):
    """32 × 96 numbers of many magnitudes."""
    return (rng.normal(size=(32, 96)) * np.exp(2 * rng.normal(size=(32, 96)))).astype(np.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_all_256_numbers_are_there_and_stay_what_they_are(signed, rng):
    table = numbers(signed)
    made = encoded(np.float32(rng.permutation(table)[None] * 3), (1, 1), signed)
    assert len(np.unique(made.codes)) == len(table) == 256
    np.testing.assert_allclose(np.sort(np.ravel(decoded(made))), table * 3, rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_each_number_becomes_the_nearest_of_its_block(signed, wide):
    x = wide if signed else wide**2
    made = jax.jit(lambda x: encoded(x, (2, 3), signed))(x)
    assert isinstance(made, Blocks)
    assert made.codes.dtype == (np.int8 if signed else np.uint8)
    largest = np.abs(x).reshape(2, 16, 3, 32).max(axis=(1, 3))
    np.testing.assert_array_equal(made.scales, largest)
    scales = np.kron(largest, np.ones((16, 32)))
    table = numbers(signed)[0 if signed else 1 :]  # without a sign a number above 0 stays above 0
    nearest = np.abs(np.float64(x / scales)[..., None] - table).min(axis=-1)
    error = np.abs(decoded(made) / scales - x / scales)
    np.testing.assert_allclose(error, nearest, atol=3e-7)


def test_what_is_above_0_stays_above_0_without_a_sign(wide):
    x = wide**2
    x[0] = 0
    np.testing.assert_array_equal(np.asarray(decoded(encoded(x, (1, 1), False))) > 0, x > 0)


@pytest.mark.parametrize("signed", [True, False])
def test_a_block_of_zeros_stays_so_and_one_that_is_not_a_number_too(signed, wide):
    x = np.abs(wide)
    x[:, :32], x[3, 70] = 0, np.nan
    made = np.asarray(decoded(encoded(x, (2, 3), signed)))
    assert not made[:, :32].any()
    assert np.isnan(made[:16, 64:]).all()
    assert np.isfinite(made[16:]).all()
