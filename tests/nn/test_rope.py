"""Rotary embedding as the complex numbers that it is, and the published scalings."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.kernels.attention import Causal
from axon.nn import Attention
from axon.nn.rope import Rope, rotate
from axon.nn.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from models.llama import Llama


@partial(jax.jit, static_argnames=("width", "rope"))
def angles(positions, width, rope=Rope()):
    return rope.angles(positions, width)


rotated = jax.jit(rotate, static_argnames="interleaved")


def turned(x, positions, theta, width):
    """Pairs (x_i, x_{i+width/2}) as complex numbers, each times e^{i·position·theta^(−2i/width)}; float64."""
    x = x.astype(np.float64)
    z = x[..., : width // 2] + 1j * x[..., width // 2 :]
    angle = positions[:, :, None, None] * theta ** (-2 * np.arange(width // 2) / width)
    z = z * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.few(theta=(10000.0,))
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("width", [2, 8, 64])
def test_rotation_is_multiplication_by_a_complex_number(theta, width, rng):
    x = rng.normal(size=(2, 5, 3, width)).astype(np.float32)
    positions = rng.integers(0, 200, (2, 5))
    made = rotated(x, angles(positions, width, Rope(theta)))
    np.testing.assert_allclose(made, turned(x, positions, theta, width), atol=1e-4)


def test_interleaved_pairs_are_neighbours_and_come_out_as_halves(rng):
    x, positions = rng.normal(size=(2, 5, 3, 8)).astype(np.float32), rng.integers(0, 200, (2, 5))
    by = angles(positions, 8)
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    np.testing.assert_array_equal(rotated(x, by, interleaved=True), rotated(halves, by))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("fraction", [1.0, 0.75])
@pytest.mark.parametrize("interleaved", [False, True])
def test_on_tpus_heads_are_not_cut_in_halves_and_not_a_bit_differs(interleaved, fraction, dtype, rng, monkeypatch):
    x = jnp.asarray(rng.normal(size=(2, 5, 3, 8)), dtype)
    by = angles(rng.integers(0, 200, (2, 5)), 8, Rope(fraction=fraction))

    def made():
        result, pull = jax.vjp(lambda x: rotate(x, by, interleaved), x)
        return result, pull(jnp.cos(result))[0], str(jax.make_jaxpr(lambda x: rotate(x, by, interleaved))(x))

    *halves, program = made()
    monkeypatch.setattr("axon.nn.rope.platform", lambda: "tpu")
    *whole, other = made()
    jax.tree.map(np.testing.assert_array_equal, whole, halves)
    assert ("dot_general" in program, "dot_general" in other) == (False, True)


def test_scores_depend_on_the_distance_of_positions_only(rng):
    q, k = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    at = lambda x, p: np.asarray(rotated(x, angles(np.full((1, 1), p), 16)))  # noqa: E731
    one, other = (np.sum(at(q, p + 7) * at(k, p)) for p in (0, 90))
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_elements_beyond_the_fraction_stay_as_they_are(rng):
    x, positions = rng.normal(size=(2, 5, 3, 8)).astype(np.float32), rng.integers(0, 200, (2, 5))
    found = np.asarray(rotated(x, angles(positions, 8, Rope(fraction=0.75))))
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(found[..., :6], rotated(x[..., :6], angles(positions, 6)))


def test_longrope_divides_by_the_long_factors_in_sequences_with_a_position_from_the_original_length_on():
    scaling = LongRopeScaling((1.0, 2.0), (3.0, 5.0), original=16, factor=4.0)
    assert scaling.changes_at == 16
    assert LinearScaling(2.0).changes_at is None
    positions = np.asarray([[0, 3, 15], [0, 3, 16]])
    found = jax.device_get(angles(positions, 4, Rope(100.0, scaling)))
    size = (1 + math.log(4) / math.log(16)) ** 0.5
    for row, by in enumerate(([1.0, 2.0], [3.0, 5.0])):
        radians = positions[row][:, None] * np.array([1.0, 0.1]) / by
        np.testing.assert_allclose(found.cos[row], size * np.cos(radians), atol=1e-5)
        np.testing.assert_allclose(found.sin[row], size * np.sin(radians), atol=1e-5)


def published(wavelength, factor, low, high, original):
    """Llama 3.1's rule, written by wavelength as in the model's release: how much a frequency is scaled."""
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return 1 / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) / factor + smooth


def test_llama3_scaling_is_the_published_rule(rng):
    factor, low = float(rng.uniform(2, 32)), float(rng.uniform(0.5, 2))
    high, original = low + float(rng.uniform(1, 5)), int(rng.integers(512, 16384))
    frequencies = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    scale = [published(2 * math.pi / f, factor, low, high, original) for f in frequencies]
    assert min(scale) < max(scale) == 1.0
    made = Llama3Scaling(factor, low, high, original).apply(frequencies)
    np.testing.assert_allclose(made, frequencies * scale, rtol=1e-12)
    assert Llama3Scaling() == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def yarn(theta, width, factor, original, fast, slow, truncate):
    """The published code's rule (github.com/jquesnelle/yarn), frequency by frequency."""
    index = lambda rotations: width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))  # noqa: E731
    first, last = index(fast), index(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    found = []
    for i in range(width // 2):
        plain = theta ** (-2 * i / width)
        ramp = min(max((i - first) / (last - first), 0.0), 1.0)
        found.append(plain / factor * ramp + plain * (1 - ramp))
    return found


@pytest.mark.parametrize("truncate", [False, True])
def test_yarn_scaling_is_the_published_rule_and_multiplies_by_its_attention_factor(truncate, rng):
    theta, factor, original = float(rng.uniform(500, 2e5)), float(rng.uniform(2, 40)), int(rng.integers(512, 16384))
    scaling = YarnScaling(factor, original, truncate=truncate)
    frequencies = theta ** (-np.arange(0, 64, 2) / 64)
    expected = yarn(theta, 64, factor, original, 32.0, 1.0, truncate)
    np.testing.assert_allclose(scaling.apply(frequencies), expected, rtol=1e-9)
    positions = rng.integers(0, 50, (1, 4), dtype=np.int32)
    radians = positions[..., None] * np.asarray(expected)
    np.testing.assert_allclose(
        angles(positions, 64, Rope(theta, scaling)).cos, (0.1 * math.log(factor) + 1) * np.cos(radians), atol=1e-4
    )
    half = Rope(theta, YarnScaling(factor, original, attention_factor=0.5, truncate=truncate))
    np.testing.assert_allclose(angles(positions, 64, half).sin, 0.5 * np.sin(radians), atol=1e-4)


def test_linear_scaling_divides_positions(rng):
    positions = rng.integers(0, 100, (1, 4))
    scaled, plain = angles(4 * positions, 8, Rope(scaling=LinearScaling(4.0))), angles(positions, 8)
    np.testing.assert_allclose(scaled.cos, plain.cos, atol=1e-5)
    np.testing.assert_allclose(scaled.sin, plain.sin, atol=1e-5)


def test_rotation_keeps_the_dtype_and_angles_are_float32():
    found = angles(np.arange(3)[None], 8)
    assert found.cos.dtype == jnp.float32
    assert rotated(np.ones((1, 3, 1, 8), jnp.bfloat16), found).dtype == jnp.bfloat16


def test_a_cpu_computes_sines_once_however_many_use_them():
    @jax.jit
    def four_layers(q, k, positions):
        angles = Rope().angles(positions, 64)
        for _ in range(4):
            q = q + jnp.einsum("bshd,bthd,bthd->bshd", rotate(q, angles), rotate(k, angles), k)
        return q

    x = jnp.ones((2, 32, 3, 64))
    text = four_layers.lower(x, x, jnp.zeros((2, 32), jnp.int32)).compile().as_text()
    assert text.count(" sine(") == text.count(" cosine(") == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Rope(theta=0.0), "Rope.theta is 0.0; must be above 0"),
        (lambda: Rope(theta=math.inf), "Rope.theta is inf; must be in (0, inf)"),
        (
            lambda: Rope(fraction=0.5).width(6),
            "Rope.fraction 0.5 of head_dim 6 is 3 elements; must be even, as rotary embedding rotates pairs",
        ),
        (
            lambda: LongRopeScaling((1.0,), (1.0, 2.0)),
            "LongRopeScaling: short has 1 divisors and long 2; both must have one for each rotated pair of a head, "
            "above 0",
        ),
        (
            lambda: Rope(scaling=LongRopeScaling((1.0,), (1.0,))).angles(jnp.zeros((1, 2)), 4),
            "LongRopeScaling: short and long have 1 divisors; must have 2, one for each rotated pair of a head",
        ),
        (lambda: LinearScaling(-2.0), "LinearScaling.factor is -2.0; must be above 0"),
        (lambda: YarnScaling(0.0), "YarnScaling.factor is 0.0; must be above 0"),
        (
            lambda: YarnScaling(2.0, slow=32.0),
            "YarnScaling.slow is 32.0; must be below YarnScaling.fast, which is 32.0",
        ),
        (lambda: Llama3Scaling(low=4.0), "Llama3Scaling.low is 4.0; must be below Llama3Scaling.high, which is 4.0"),
    ],
)
def test_frequencies_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(UserError) as caught:
        wrong()
    assert str(caught.value) == message


def test_text_is_written_as_far_as_keys_rotate_alike_whatever_follows_them():
    dynamic = Llama(8, 8, 2, 2, 2, 8, rope=Rope(scaling=DynamicScaling(2.0, 24)))
    assert dynamic.build().max_length == 24
    assert replace(dynamic, rope=Rope(scaling=LinearScaling(2.0))).build().max_length is None


def test_mscale_is_the_published_rule():
    """DeepSeek's `yarn_get_mscale`: 0.1·mscale·ln(factor) + 1, and scores of latent attention times the square of one
    of them; m(1) where one is none, as in transformers."""
    m = lambda mscale: 0.1 * mscale * math.log(40.0) + 1  # noqa: E731
    both = YarnScaling(40.0, mscale=1.5, mscale_all_dim=0.7)
    assert both.magnitude == pytest.approx(m(1.5) / m(0.7))
    assert Rope(scaling=both).score_scale == pytest.approx(m(0.7) ** 2)
    assert YarnScaling(40.0).magnitude == pytest.approx(m(1.0))
    assert Rope(scaling=YarnScaling(40.0)).score_scale == Rope().score_scale == 1.0
    for one in (replace(both, mscale=0.0), replace(both, mscale_all_dim=0.0)):
        assert one.magnitude == pytest.approx(m(1.0))
    assert YarnScaling(0.5).magnitude == 1.0
    plain = Attention({"embed": 8, "heads": 2, "kv_heads": 2, "head_dim": 4}, Causal(), rope=Rope(scaling=both))
    assert plain.config.scale == 0.5
