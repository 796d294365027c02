"""Formats: bit for bit the formula with `ml_dtypes`; blocks of zeros, of no numbers, and of more than there is."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axon.errors import UserError
from axon.kernels.quantized_matmul import dequantize
from axon.precision.formats import E2M1, E4M3, E8M0, Format, largest_magnitudes, quantized
from axon.precision.stochastic import rounded_to_e2m1

NAMES, SHAPE, SUMMED = ("batch", "seq", "embed"), (3, 64, 96), frozenset({"embed"})
DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
FORMATS = [
    *(Format(dtype, share) for dtype, share in itertools.product(DTYPES, ("tensor", "row"))),
    Format("float8_e4m3fn", 32, tile=16),
    Format("float8_e4m3fn", 32, scale_dtype=E8M0),
]
COUNTS = {"tensor": (3, 1, 1), "row": (3, 64, 1)}


def counts_of(form):
    return form.num_scales(NAMES, SHAPE, SUMMED)


@jax.jit(static_argnums=1)
def of(x, form):
    counts = counts_of(form)
    return quantized(x, form, largest_magnitudes(x, counts))


def blocks(x, counts):
    """Each block of `x`, by its place."""
    sizes = [size // count for size, count in zip(x.shape, counts, strict=True)]
    for place in np.ndindex(*counts):
        yield place, x[tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, sizes, strict=True))]


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_values_and_scales_are_the_formulas_bit_for_bit(form, rng):
    x = (rng.normal(size=SHAPE) * 10.0 ** rng.uniform(-6, 6, (*SHAPE[:2], 1))).astype(np.float32)
    values, scales = map(np.asarray, of(x, form))
    dtype = np.dtype(getattr(ml_dtypes, form.dtype, np.int8))
    largest = np.float32(127 if form.dtype == "int8" else ml_dtypes.finfo(dtype).max)
    own = dict(blocks(values, counts_of(form)))
    for place, block in blocks(x, counts_of(form)):
        most = np.abs(block).max()
        scale = (
            2.0 ** (np.floor(np.log2(most)) - 8) if form.scale_dtype == E8M0 else most * np.float32(1 / float(largest))
        )
        assert scales[place] == np.float32(scale)
        scaled = np.clip(block * (np.float32(1) / np.float32(scale)), -largest, largest)
        expected = np.rint(scaled).astype(np.int8) if form.dtype == "int8" else scaled.astype(dtype)
        np.testing.assert_array_equal(own[place].view(np.uint8), expected.view(np.uint8))


def edges(dtype):
    """Every finite number of a dtype, the middles of neighbours (ties), and the float32 next to each, on both sides."""
    if dtype == "int8":
        numbers = np.arange(-127, 128, dtype=np.float64)
    else:
        bits = 4 if dtype == E2M1 else 8
        every = np.arange(2**bits, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
        numbers = np.unique(every[np.isfinite(every)])
    at = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2, [-0.0, 2 * numbers[0], 2 * numbers[-1]]])
    at = at.astype(np.float32)
    return np.concatenate([np.nextafter(at, np.float32(-np.inf)), at, np.nextafter(at, np.float32(np.inf))])


@pytest.mark.parametrize("dtype", [*DTYPES, E2M1])
def test_every_number_every_tie_and_its_neighbours_are_rounded_as_ml_dtypes_rounds_them(dtype):
    form, x = Format(dtype), edges(dtype)
    x = x[np.abs(x) >= np.finfo(np.float32).tiny]  # XLA takes subnormal float32 for 0
    actual = np.asarray(jax.jit(form.values)(x, jnp.ones_like(x)))
    limited = np.clip(x, -form.most, form.most)
    if dtype == "int8":
        np.testing.assert_array_equal(actual, np.rint(limited))
        return
    expected = limited.astype(getattr(ml_dtypes, dtype)).astype(np.float32)
    np.testing.assert_array_equal(actual.astype(np.float32).view(np.uint32), expected.view(np.uint32))


def test_scales_of_powers_of_two_are_e8m0_at_every_power_and_beside_it():
    powers = np.float32(2.0) ** np.arange(-117, 128, dtype=np.float32)
    largest = np.concatenate([np.nextafter(powers, np.float32(0)), powers, np.nextafter(powers, np.float32(np.inf))])
    form = Format(E4M3, 32, scale_dtype=E8M0)
    actual = np.asarray(jax.jit(form.scales)(largest))
    exponent = np.frexp(largest.astype(np.float64))[1]
    expected = np.ldexp(1.0, exponent - 1 - 8)
    np.testing.assert_array_equal(actual, np.maximum(expected, 2.0**-126))
    np.testing.assert_array_equal(actual.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32), actual)


def test_blocks_of_4_bits_have_scales_of_two_levels_bit_for_bit(rng):
    form = Format(E2M1, 16, scale_dtype=E4M3)
    x = (rng.normal(size=SHAPE) * 10.0 ** rng.uniform(-3, 3, (*SHAPE[:2], 1))).astype(np.float32)
    x[0, 0, :16] = 0
    counts = form.num_scales(NAMES, SHAPE, SUMMED)
    largest = np.abs(x).max((1, 2), keepdims=True)
    both = jax.jit(lambda x, of_all: quantized(x, form, largest_magnitudes(x, counts), of_all))
    values, scales = map(np.asarray, both(x, largest))
    tiny = np.finfo(np.float32).tiny
    for place, block in blocks(x, counts):
        second = np.maximum(largest[place[0], 0, 0] * np.float32(1 / (6.0 * 448)), tiny)
        first = (np.maximum(np.abs(block).max() * np.float32(1 / 6.0), tiny) / second).astype(ml_dtypes.float8_e4m3fn)
        scale = first.astype(np.float32) * second
        assert scales[place] == scale
        scaled = np.clip(block * np.float32(0 if scale == 0 else np.float32(1) / scale), -6, 6)
        expected = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        actual = values[:, :, place[2] * 16 : place[2] * 16 + 16][place[0], place[1]]
        np.testing.assert_array_equal(actual.astype(np.float32), expected.reshape(-1))


def test_4_bits_are_rounded_stochastically_to_a_neighbour_and_to_the_number_in_the_mean(rng):
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = np.unique([*grid, *-grid])
    x = rng.uniform(-6, 6, 2**18).astype(np.float32)
    y = np.asarray(jax.jit(rounded_to_e2m1)(x), np.float64)
    low = np.searchsorted(grid, x, side="right") - 1
    assert np.all((y == grid[low]) | (y == grid[np.minimum(low + 1, len(grid) - 1)]))
    for number in range(len(grid) - 1):
        error = (y - x)[low == number]
        assert abs(error.mean()) < 5 * error.std() / np.sqrt(len(error))
    np.testing.assert_array_equal(jax.jit(rounded_to_e2m1)(np.float32([*grid, 7, np.nan])), [*grid, 7, np.nan])


def test_mixed_operands_have_the_product_of_plain_ones(rng):
    form, names = Format(E2M1, 16, hadamard=True), ("batch", "seq", "embed")
    x, dy = (rng.normal(size=(2, 64, 3)).astype(np.float32) for _ in range(2))
    a, b = (np.asarray(form.rotated(one, names, frozenset({"batch", "seq"}), (2, 4, 3)), np.float64) for one in (x, dy))
    assert np.abs(a - x).max() > 0.1
    np.testing.assert_allclose(np.einsum("bse,bsf->ef", a, b), np.einsum("bse,bsf->ef", x, dy), atol=1e-4)
    with pytest.raises(UserError, match="blocks of 12 of the axis 'seq'"):
        form.rotated(x[:, :12], names, frozenset({"batch", "seq"}), (2, 1, 3))


def test_a_sequence_never_shares_a_scale_with_another():
    for share, counts in COUNTS.items():
        assert Format("int8", share).num_scales(NAMES, SHAPE, SUMMED) == counts
    assert Format("int8", 32, tile=16).num_scales(NAMES, SHAPE, SUMMED) == (3, 4, 3)
    assert Format("int8", 128, tile=128).num_scales(NAMES, SHAPE, SUMMED) == (3, 1, 1)
    assert Format("int8", "row").num_scales(NAMES, SHAPE, frozenset({"batch", "seq"})) == (3, 1, 96)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_block_of_zeros_is_zeros_and_one_with_no_number_has_none(form):
    x = np.zeros(SHAPE, np.float32)
    x[1, 5, 3], x[2, 7, 40] = np.inf, np.nan
    back = np.asarray(jax.jit(lambda x: dequantize(of(x, form)))(x))
    own = dict(blocks(back, counts_of(form)))
    for place, block in blocks(x, counts_of(form)):
        expected = 0.0 if np.all(np.isfinite(block)) else np.nan
        np.testing.assert_array_equal(own[place], np.full(block.shape, expected))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_is_beyond_the_recorded_magnitudes_is_limited(form, rng):
    x = (4 * rng.normal(size=SHAPE)).astype(np.float32)
    largest = jnp.ones(counts_of(form), jnp.float32)
    back = np.asarray(dequantize(quantized(jnp.asarray(x), form, largest)))
    limit = 448 / 256 if form.scale_dtype == E8M0 else 1.0
    np.testing.assert_allclose(back[np.abs(x) > limit], np.sign(x[np.abs(x) > limit]) * limit, rtol=1e-6)


def test_an_axis_that_blocks_do_not_divide_is_refused_by_name():
    with pytest.raises(UserError, match=r"32.*'embed' of 100.*paths"):
        Format("int8", 32).num_scales(("seq", "embed"), (64, 100), SUMMED)
