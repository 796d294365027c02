"""MXFP4 bit by bit: numbers and scales by `ml_dtypes`, and what is MXFP4 stays what it is."""

import jax
import ml_dtypes
import numpy as np

from axon.precision.codebook import unpacked
from axon.precision.formats import mx_scales
from axon.precision.microscaling import E2M1_CODES, mx_packed


def wide(codes, scales, axis=-2):
    return np.asarray(jax.jit(lambda c, s: unpacked(c, mx_scales(s), axis, E2M1_CODES))(codes, scales))


def stored(rng, shape, low=110, high=140):
    """Codes, one a number, bytes of e8m0 for blocks of 32 along the second axis, and what both stand for."""
    before, length, after = shape
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scales = rng.integers(low, high, (before, length // 32, after), dtype=np.uint8)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return codes, scales, numbers * np.repeat(factors, 32, axis=1)


def test_a_byte_holds_two_numbers_by_their_bits_and_a_scale_is_e8m0(rng):
    codes, scales, expected = stored(rng, (3, 64, 5))
    np.testing.assert_array_equal(wide(codes[:, ::2] | codes[:, 1::2] << 4, scales), expected)


def test_what_is_mxfp4_is_stored_as_it_is(rng):
    _, _, values = stored(rng, (3, 96, 5), low=4, high=250)
    values[0, :32] = 0
    values[1, :32] *= np.abs(values[1, :32]) < 2.0 ** -rng.integers(1, 9)  # blocks whose largest number is small
    codes, scales = jax.jit(lambda x: mx_packed(x, -2, 32))(values)
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == ((3, 48, 5), np.uint8, (3, 3, 5), np.uint8)
    np.testing.assert_array_equal(wide(codes, scales), values)


def test_other_numbers_are_rounded_to_the_nearest_and_ties_to_even(rng):
    x = rng.normal(size=(2, 512, 3)).astype(np.float32) * np.float32(10.0 ** rng.uniform(-9, 9))
    x[0, :256] = rng.integers(-24, 25, (256, 3)) / 4  # ties
    largest = np.abs(x).reshape(2, 16, 32, 3).max(axis=2)
    powers = np.exp2(np.floor(np.log2(largest.astype(np.float64))) - 2)
    factors = np.repeat(powers, 32, axis=1).astype(np.float32)
    expected = np.clip(x / factors, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * factors
    codes, scales = jax.jit(lambda x: mx_packed(x, -2, 32))(x)
    np.testing.assert_array_equal(mx_scales(scales), powers.astype(np.float32))
    np.testing.assert_array_equal(wide(codes, scales), expected)


def test_a_block_that_is_not_finite_stays_visible():
    x = np.ones((1, 64, 2), np.float32)
    x[0, 3, 0], x[0, 40, 1] = np.inf, np.nan
    found = wide(*jax.jit(lambda x: mx_packed(x, -2, 32))(x))
    assert np.isnan([found[0, :32, 0], found[0, 32:, 1]]).all()
    np.testing.assert_array_equal(found[0, 32:, 0], 1)
