"""Attention whose products are of e4m3 operands: scales, errors against float64, the kernel beside its emulation."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axon.chips import CHIPS
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    FP8Products,
    SameDocument,
    Window,
    attention_reference,
    fp8,
)
from axon.kernels.attention.tiles import Tiles
from axon.kernels.attention.tpu import attention_tpu
from axon.kernels.attention.xla import attention_xla
from scripts.bench.case import Part
from scripts.bench.compiled import lowered

TILES = Tiles(512, 512, 512, 256)
EMULATED = FP8Products(emulate=True)

FLIP = 1e-3
"""More than what weights change a result, as a norm, that fall to the other neighbour in e4m3: some in 10⁵ weights do,
by rounding of float32, and each by 2⁻³ of itself."""


def draw(rng, batch=1, queries=300, keys=300, heads=2, kv_heads=1, width=64, outliers=0.0):
    """Normal numbers, and among 1,000 of them one that is ten times as large, as in FlashAttention-3's table 2."""

    def operand(*shape):
        x = rng.normal(size=shape) + outliers * rng.normal(size=shape) * (rng.random(shape) < 1e-3)
        return x.astype(np.float32)

    keys_shape = (batch, keys, kv_heads, width)
    return operand(batch, queries, heads, width), operand(*keys_shape), operand(*keys_shape)


def relative(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def dense(q, k, v, scale):
    """The formula without a mask, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def emulated(q, k, v, scale):
    config = AttentionConfig(Everything(), scale, products=EMULATED)
    return jax.jit(lambda q, k, v: attention_xla(q, k, v, config)[0])(q, k, v)


def sylvester(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def test_values_and_scales_are_those_of_the_formula_bit_for_bit(rng):
    """Of whole numbers, whose mixtures are exact: each block's largest magnitude is 448 scales."""
    q, k, v = (rng.integers(-9, 10, (2, 3, 300, 64)).astype(np.float32) for _ in range(3))
    matrix = fp8.SIGNS[:64, None] * sylvester(64) / 8
    made = jax.jit(fp8.quantized_operands)(q, k, v)
    for x, rows, found in zip((q @ matrix, k @ matrix, v), (128, 256, 256), made, strict=True):
        for block in range(-(-300 // rows)):
            own = x[:, :, block * rows : (block + 1) * rows].astype(np.float32)
            scales = np.abs(own).max(axis=(2, 3)) * np.float32(1 / 448)
            np.testing.assert_array_equal(found.scales[:, :, block], scales)
            expected = (own * (1 / scales)[:, :, None, None]).astype(ml_dtypes.float8_e4m3fn)
            np.testing.assert_array_equal(found.values[:, :, block * rows : (block + 1) * rows], expected)


def test_the_error_is_that_of_three_roundings_to_four_bits(rng):
    """Of scores of normal numbers, of weights and of values: each at most 2⁻⁴ of a number, and of independent signs."""
    q, k, v = draw(rng, keys=600)
    assert 2**-6 < relative(emulated(q, k, v, 0.125), dense(q, k, v, 0.125)) < 2**-3.5


def test_mixing_takes_outliers_error_away(rng, monkeypatch):
    """Scores whose two products are each of an outlier, rounded to 4 bits, and of 128 numbers: mixed, of many alike."""
    q, k, v = draw(rng, width=128)
    q[..., 0] *= 10
    k[..., 0] *= 10
    expected = dense(q, k, v, 0.04)
    mixed = relative(emulated(q, k, v, 0.04), expected)
    monkeypatch.setattr(fp8, "mixed", lambda x, block: x)
    assert mixed < 0.8 * relative(emulated(q, k, v, 0.04), expected)


def run(implementation, problem, mask, cap=None, products=None, **more):
    """Output, log-sum-exp and, of a weighted sum of the output, gradients."""
    (q, k, v), inputs, weight = problem
    config = AttentionConfig(mask, 0.125, cap, products)

    def objective(q, k, v):
        out, lse = implementation(q, k, v, config, inputs, **more)
        return jnp.sum(out * weight), (out, lse)

    (_, made), gradients = jax.jit(jax.value_and_grad(objective, (0, 1, 2), has_aux=True))(q, k, v)
    return *made, *gradients


def problem(rng, queries, keys, sinks):
    """The last of the keys are the queries' own."""
    q, k, v = draw(rng, queries=queries, keys=keys, heads=4, kv_heads=2)
    of_keys = np.sort(rng.integers(0, 3, (1, keys)), axis=1).astype(np.int32)
    documents, of_heads = (of_keys[:, keys - queries :], of_keys), rng.normal(size=4).astype(np.float32)
    inputs = AttentionInputs(documents, keys - queries, of_heads if sinks else None)
    return (q, k, v), inputs, rng.normal(size=q.shape)


def test_gradients_are_those_of_operands_that_are_not_rounded(rng):
    """But for the log-sum-exp and the output, which are the forward's."""
    own = problem(rng, 130, 300, sinks=True)
    found, expected = run(attention_xla, own, Causal(), 3.0, EMULATED), run(attention_reference, own, Causal(), 3.0)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 2**-3


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    ("mask", "cap", "sinks"),
    [(Causal(), None, True), (Causal() & SameDocument() & Window(190), 3.0, False)],
    ids=str,
)
def test_the_tpu_kernel_is_its_emulation(mask, cap, sinks, rng):
    """Interpreted: groups, padding, a softmax over several blocks, some of which are partly seen."""
    own = problem(rng, 150, 520, sinks)
    kernel = run(attention_tpu, own, mask, cap, FP8Products(), tiles=TILES, interpret=True)
    for one, other in zip(kernel, run(attention_xla, own, mask, cap, EMULATED), strict=True):
        assert relative(one, other) < FLIP


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("heads", [(8, 1), (2, 2)], ids=["group", "heads"])
def test_a_chip_multiplies_in_e4m3(heads):
    pytest.importorskip("libtpu", reason="needs the TPU compiler: scripts/setup compilers")
    config = AttentionConfig(Causal() & SameDocument(), 0.1, 50.0, FP8Products())
    of_q, of_k = (jax.ShapeDtypeStruct((1, 1100, count, 128), jnp.bfloat16) for count in heads)
    operands = (of_q, of_k, of_k, jax.ShapeDtypeStruct((1, 1100), jnp.int32))

    def attend(q, k, v, documents):
        return attention_tpu(q, k, v, config, AttentionInputs((documents, documents)))[0]

    part = Part("attention", "forward", "axon_attention_forward", attend, operands, None)
    text = lowered(part, CHIPS["tpu7x"].topology).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert "f8e4m3fn[" in text


def test_a_query_that_is_no_number_stays_so_and_zeros_stay_zeros(rng):
    q, k, v = draw(rng, batch=2, queries=256)
    q[0, 130, 0, 5], v[1] = np.nan, 0
    out = np.asarray(emulated(q, k, v, 0.125))
    assert np.isnan(out[0, 128:, 0]).all(), "all of a block that shares a scale"
    assert np.isfinite(out[0, :128]).all()
    assert np.isfinite(out[0, :, 1]).all()
    np.testing.assert_array_equal(out[1], 0)
    q[:] = 0
    means = np.broadcast_to(v[:1].astype(np.float64).mean(axis=1, keepdims=True), q[:1].shape)
    assert relative(emulated(q, k, v, 0.125)[:1], means) < 2**-2


def test_a_query_that_sees_no_key_gives_zeros(rng):
    q, k, v = draw(rng, queries=8, keys=300)
    config = AttentionConfig(Causal() & SameDocument(), 0.125, products=EMULATED)
    inputs = AttentionInputs((jnp.full((1, 8), 7, jnp.int32), jnp.zeros((1, 300), jnp.int32)), 200)
    out, lse = jax.jit(lambda q, k, v: attention_xla(q, k, v, config, inputs))(q, k, v)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
