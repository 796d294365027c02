"""Every implementation of the quantised product: exact where it can be, within bounds by formula where it cannot."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon import axes
from axon.errors import UserError
from axon.kernels.quantized_matmul import (
    BLOCK,
    COLUMN,
    ROW,
    ROW_BLOCK,
    TENSOR,
    Granularity,
    Quantized,
    quantize,
    quantized_matmul,
    quantized_matmul_reference,
    quantized_matmul_tpu,
    quantized_matmul_xla,
)
from axon.kernels.quantized_matmul.tiling import Tiles, tiles_of
from axon.plan.flops import count_flops
from scripts.bench.cases.quantized_matmul import cases

FP8 = jnp.float8_e4m3fn

SMALL = Tiles(128, 128, 128)

IMPLEMENTATIONS = {
    "reference": quantized_matmul_reference,
    "xla": quantized_matmul_xla,
    "tpu": lambda x, w, dtype: quantized_matmul_tpu(x, w, dtype, largest=SMALL, interpret=True),
    "tpu, whole blocks in a tile": lambda x, w, dtype: quantized_matmul_tpu(x, w, dtype, interpret=True),
}

GRANULARITIES = {
    "tensor": (TENSOR, TENSOR),
    "row and column": (ROW, COLUMN),
    "blocks": (ROW_BLOCK, BLOCK),
    "blocks of x alone": (ROW_BLOCK, COLUMN),
    "blocks of two tiles": (Granularity(1, 256), Granularity(256, 128)),
    "groups of a column": (ROW, Granularity(128, 1)),
}


quantized = jax.jit(quantize, static_argnums=(1, 2))


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return jax.jit(IMPLEMENTATIONS[request.param], static_argnums=2)


@pytest.fixture(params=GRANULARITIES)
def granularity(request):
    return GRANULARITIES[request.param]


def wide(operand):
    """What a quantised operand stands for, in float64."""
    values, scales = (np.asarray(part).astype(np.float64) for part in operand)
    for axis in (0, 1):
        scales = np.repeat(scales, values.shape[axis] // scales.shape[axis], axis=axis)
    return values * scales


def integers(rng, rows, inner, columns):
    """int8 operands with one scale each, a power of two, so that scaling rounds nothing."""
    for shape in ((rows, inner), (inner, columns)):
        values = rng.integers(-127, 128, shape).astype(np.int8)
        yield Quantized(values, np.full((1, 1), 2.0 ** rng.integers(-9, 3), np.float32))


def test_int8_products_are_exact_to_the_bit(implementation, rng):
    x, w = integers(rng, 40, 512, 256)  # sums stay under 2²⁴, which float32 holds
    np.testing.assert_array_equal(np.asarray(implementation(x, w, jnp.float32), np.float64), wide(x) @ wide(w))


@pytest.mark.parametrize("name", ["xla", "tpu", "tpu, whole blocks in a tile"])
def test_int8_sums_that_float32_cannot_hold_are_rounded_once(name, rng):
    x, w = integers(rng, 8, 4096, 128)
    x, w = (operand._replace(values=np.abs(operand.values)) for operand in (x, w))
    exact = wide(x) @ wide(w)
    assert exact.max() / (wide(x).max() * wide(w).max()) * 127**2 > 2**24
    product = jax.jit(IMPLEMENTATIONS[name], static_argnums=2)
    np.testing.assert_array_equal(product(x, w, jnp.float32), exact.astype(np.float32))


@pytest.mark.parametrize("pair", [(TENSOR, TENSOR), (ROW, COLUMN), (Granularity(1, 2**17 + 4096), COLUMN)], ids=str)
def test_more_int8_products_than_int32_has_room_for_are_summed_right(pair, rng):
    inner = 2 * (2**17 + 4096)
    signs = rng.choice([-1.0, 1.0], (3, 1)), rng.choice([-1.0, 1.0], (1, 2))
    x, w = signs[0] * np.ones((3, inner)), signs[1] * np.ones((inner, 2))
    x[:, rng.integers(0, inner, 50)] = rng.uniform(-1, 1, (3, 50))
    made = [quantized(jnp.asarray(a, jnp.float32), jnp.int8, how) for a, how in zip((x, w), pair, strict=True)]
    exact = wide(made[0]) @ wide(made[1])
    assert np.all(np.abs(exact) * 127**2 > 2**32)
    product = jax.jit(partial(quantized_matmul, dtype=jnp.float32))
    np.testing.assert_allclose(product(*made), exact, rtol=1e-6)


@pytest.mark.few(dtype=(jnp.int8,), implementation=("tpu",))
@pytest.mark.few(dtype=(jnp.int8,), granularity=("blocks of two tiles", "groups of a column"))
@pytest.mark.parametrize("dtype", [jnp.int8, FP8], ids=["int8", "fp8"])
def test_products_are_those_of_what_the_operands_stand_for(implementation, granularity, dtype, rng):
    """Summing k products in float32 errs by k·2⁻²⁴ of the sum of their sizes at most; scaling by 3 roundings more."""
    x = quantized(jnp.asarray(rng.normal(size=(136, 512)), jnp.float32), dtype, granularity[0])
    w = quantized(jnp.asarray(rng.normal(size=(512, 256)), jnp.float32), dtype, granularity[1])
    made = np.asarray(implementation(x, w, jnp.float32), np.float64)
    bound = (512 + 4) * 2**-24 * (np.abs(wide(x)) @ np.abs(wide(w)))
    assert np.all(np.abs(made - wide(x) @ wide(w)) <= bound)


def error(x, operand, granularity, dtype):
    """What rounding to nearest may do: half a step of int8; of fp8 2⁻⁴ of a number, or half its smallest step."""
    values, scales = operand
    step = np.broadcast_to(wide(Quantized(np.ones(values.shape), scales)), x.shape)
    return step / 2 if dtype == jnp.int8 else np.maximum(2.0**-4 * np.abs(x), step * 2.0**-10)


@pytest.mark.full
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from([jnp.int8, FP8]), which=st.sampled_from([*GRANULARITIES]))
def test_the_error_of_a_product_is_that_of_rounding_its_operands(seed, dtype, which):
    rng = np.random.default_rng(seed)
    shapes = (16, 256), (256, 128)
    spread = [np.exp(3 * rng.normal(size=(shape[0], 1))) for shape in shapes]
    x, w = ((rng.normal(size=shape) * scale).astype(np.float32) for shape, scale in zip(shapes, spread, strict=True))
    made = [quantized(jnp.asarray(a), dtype, how) for a, how in zip((x, w), GRANULARITIES[which], strict=True)]
    bounds = [error(a, q, how, dtype) for a, q, how in zip((x, w), made, GRANULARITIES[which], strict=True)]
    for a, q, bound in zip((x, w), made, bounds, strict=True):
        assert np.all(np.abs(wide(q) - a) <= bound * (1 + 1e-5))
    total = np.abs(x) @ bounds[1] + bounds[0] @ np.abs(w) + bounds[0] @ bounds[1]
    total += 300 * 2.0**-24 * (np.abs(wide(made[0])) @ np.abs(wide(made[1])))
    product = np.asarray(quantized_matmul_xla(*made, jnp.float32), np.float64)
    assert np.all(np.abs(product - x.astype(np.float64) @ w) <= total * (1 + 1e-5))


@pytest.mark.parametrize("dtype", [jnp.int8, FP8], ids=["int8", "fp8"])
def test_the_largest_of_a_block_comes_back_and_blocks_of_zeros_or_less_make_no_nan(dtype, rng):
    x = rng.normal(size=(256, 256)).astype(np.float32)
    x[:128, 128:] = 0
    x[128:, :128] = 1e-40  # less than the smallest normal number
    back = wide(quantized(jnp.asarray(x), dtype, BLOCK))
    for block in (slice(128), slice(128, None)):
        np.testing.assert_allclose(np.abs(back[block, block]).max(), np.abs(x[block, block]).max(), rtol=1e-6)
    assert not np.any(back[:128, 128:])
    assert np.all(np.isfinite(back))


@pytest.mark.few(dtype=(jnp.int8,), granularity=("tensor", "blocks of two tiles"))
@pytest.mark.parametrize("dtype", [jnp.int8, FP8], ids=["int8", "fp8"])
def test_the_kernel_has_no_race(dtype, granularity, rng, watched):
    x = quantized(jnp.asarray(rng.normal(size=(40, 256)), jnp.float32), dtype, granularity[0])
    w = quantized(jnp.asarray(rng.normal(size=(256, 256)), jnp.float32), dtype, granularity[1])
    made = quantized_matmul_tpu(x, w, jnp.float32, largest=SMALL, interpret=watched)
    np.testing.assert_allclose(made, wide(x) @ wide(w), atol=1e-3)


def test_the_result_is_bfloat16_unless_asked_otherwise(rng):
    x, w = integers(rng, 8, 128, 128)
    assert quantized_matmul(x, w).dtype == jnp.bfloat16
    assert quantized_matmul(x, w, dtype=jnp.float32).dtype == jnp.float32


def test_a_gradient_through_it_is_refused_and_one_beside_it_is_not(rng):
    a = jnp.asarray(rng.normal(size=(8, 128)), jnp.float32)
    w = quantized(jnp.asarray(rng.normal(size=(128, 128)), jnp.float32), jnp.int8, COLUMN)

    def objective(a, scale, hold):
        return jnp.sum(scale * quantized_matmul(quantize(hold(a), jnp.int8, ROW), w, dtype=jnp.float32))

    with pytest.raises(UserError, match=r"put jax\.lax\.stop_gradient around"):
        jax.grad(jax.jit(lambda a: objective(a, 1.0, lambda a: a)))(a)
    held = jax.grad(lambda a, scale: objective(a, scale, jax.lax.stop_gradient), (0, 1))
    da, dscale = jax.jit(held)(a, 2.0)
    assert not np.any(da)
    np.testing.assert_allclose(dscale, jax.jit(lambda a: objective(a, 1.0, lambda a: a))(a), rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "x_scales", "w", "w_scales", "reason"),
    [
        ((8, 256), (8, 1), (128, 128), (1, 1), "x has a k of 256, w of 128"),
        ((8, 256), (3, 1), (256, 128), (1, 1), r"x has scales \(3, 1\), which do not divide its values \(8, 256\)"),
        ((8, 256), (8, 2), (256, 128), (4, 1), "along k there are 2 scales of x and 4 of w"),
        ((8, 256), (8,), (256, 128), (4, 1), r"two dimensions, not \(8, 256\) and \(8,\)"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused_with_their_numbers(x, x_scales, w, w_scales, reason):
    operands = [Quantized(jnp.zeros(v, jnp.int8), jnp.ones(s)) for v, s in ((x, x_scales), (w, w_scales))]
    with pytest.raises(UserError, match=reason):
        quantized_matmul(*operands)


def test_dtypes_that_do_not_go_together_are_refused():
    one = jnp.ones((1, 1))
    with pytest.raises(UserError, match="not int8 and float8_e4m3fn"):
        quantized_matmul(Quantized(jnp.zeros((8, 8), jnp.int8), one), Quantized(jnp.zeros((8, 8), FP8), one))
    with pytest.raises(UserError, match="to int8 or float8_e4m3fn, not float16"):
        quantize(jnp.zeros((8, 8)), jnp.float16, TENSOR)
    with pytest.raises(UserError, match="blocks of 128 × 128 do not divide a matrix of 128 × 200"):
        quantize(jnp.zeros((128, 200)), jnp.int8, BLOCK)


def chosen(platform, x, w):
    placement = SimpleNamespace(platform=platform, chip="NVIDIA H200")
    with axes.activate(axes.Scope(placement)) as scope:
        jax.make_jaxpr(lambda x, w: quantized_matmul(x, w))(x, w)  # a new function, which JAX has no trace of
    return scope.choices["quantized_matmul"]


def test_an_implementation_is_chosen_by_platform_and_said(rng):
    x, w = integers(rng, 8, 256, 128)
    passed = " (not mosaic: w is stored `k out`, and 8-bit tensor cores read both operands along k: store k_major(w)"
    passed += "; not tpu: this program is for a gpu)"
    for platform, name, why in (("tpu", "tpu", ""), ("gpu", "xla", passed), ("cpu", "xla", "")):
        assert chosen(platform, x, w) == f"{name}, 8 × 256 by 128, int8, (1, 1) and (1, 1) scales{why}"


@pytest.mark.parametrize(
    ("inner", "out", "blocks", "reason"),
    [
        (200, 128, 1, "multiples of 128, not 200 and 128"),
        (256, 128, 4, "blocks that are multiples of 128, not 64"),
        (2**18, 128, 1, "a sum of 262144 products"),
    ],
)
def test_what_the_kernel_cannot_do_takes_xla_and_says_why(inner, out, blocks, reason):
    values = [jax.ShapeDtypeStruct(shape, jnp.int8) for shape in ((8, inner), (inner, out))]
    scales = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, blocks), (blocks, 1))]
    said = chosen("tpu", *(Quantized(*pair) for pair in zip(values, scales, strict=True)))
    assert said.startswith("xla")
    assert reason in said


@settings(max_examples=40)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(1, 5000))
def test_tiles_divide_the_product_and_meet_the_edges_of_blocks(per_block, blocks, columns, rows):
    inner = per_block * blocks * 128
    tiles = tiles_of(rows, inner, columns * 128, blocks)
    assert inner % tiles.inner == columns * 128 % tiles.columns == tiles.rows % (32 if blocks == 1 else 128) == 0
    block = per_block * 128
    assert tiles.inner % block == 0 or block % tiles.inner == 0
    assert tiles.inner <= 1024  # so that even a chip without integer products sums int8 exactly


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_cost_of_a_case_is_what_its_kernel_says_of_itself(case):
    counted = count_flops(case.function, *case.operands)
    assert (counted.flops, counted.uncounted) == (case.cost.flops, ())
