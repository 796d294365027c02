"""Every implementation of the grouped product against float64: values, both gradients, and what it may not hold."""

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
from axon.kernels import grouped_matmul as kernels
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.grouped_matmul import (
    grouped_matmul,
    grouped_matmul_gradients,
    grouped_matmul_reference,
    grouped_matmul_tpu,
    grouped_matmul_xla,
)

ROWS, EMBED, OUT, GROUPS = 300, 256, 128, 4

IMPLEMENTATIONS = {
    "reference": grouped_matmul_reference,
    "xla": grouped_matmul_xla,
    "tpu": lambda x, w, sizes: grouped_matmul_tpu(x, w, sizes, interpret=True),
}


def with_gradients(implementation):
    def run(x, w, sizes, dy):
        y, backward = jax.vjp(lambda x, w: implementation(x, w, sizes), x, w)
        return y, *backward(dy)

    return jax.jit(run)


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def run(request):
    """`x, w, sizes, dy` → `y, dx, dw`, compiled once for all draws."""
    return with_gradients(IMPLEMENTATIONS[request.param])


def draw(rng, dtype=np.float32):
    shapes = (ROWS, EMBED), (GROUPS, EMBED, OUT), (ROWS, OUT)
    return (np.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def formula(x, w, sizes, dy):
    """float64: `y, dx, dw`, a group at a time."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for group, (first, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        own = slice(first, first + size)
        y[own], dx[own], dw[group] = x[own] @ w[group], dy[own] @ w[group].T, x[own].T @ dy[own]
    return y, dx, dw


def close(actual, expected, tolerance):
    actual = np.asarray(actual, np.float64)
    assert np.linalg.norm(actual - expected) <= tolerance * max(np.linalg.norm(expected), 1e-3)


@st.composite
def group_sizes(draw):
    """Any sizes whose sum is at most `ROWS`: often with empty groups, and with ends on a tile's edge."""
    edges = st.one_of(st.integers(0, ROWS), st.sampled_from([0, 64, 128, 256, ROWS]))
    ends = sorted(draw(st.lists(edges, min_size=GROUPS, max_size=GROUPS)))
    return np.diff(ends, prepend=0).astype(np.int32)


EXTREMES = ([0, 0, 0, 0], [0, 0, ROWS, 0], [0, 0, 0, 1], [128, 128, 44, 0], [75, 75, 75, 75], [0, 299, 0, 0])


@settings(max_examples=15)
@given(sizes=group_sizes(), seed=st.integers(0, 2**31))
def test_values_and_gradients_are_those_of_the_formula_whatever_the_sizes(run, sizes, seed):
    x, w, dy = draw(np.random.default_rng(seed))
    for one, other in zip(run(x, w, sizes, dy), formula(x, w, sizes, dy), strict=True):
        close(one, other, 2e-6)


@pytest.mark.parametrize("sizes", EXTREMES, ids=str)
def test_rows_in_no_group_give_zeros_whatever_they_hold_and_empty_groups_get_zeros(run, sizes, rng):
    x, w, dy = draw(rng)
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan
    y, dx, dw = run(x, w, np.array(sizes, np.int32), dy)
    assert not np.any(y[sum(sizes) :])
    assert not np.any(dx[sum(sizes) :])
    assert not np.any(np.asarray(dw)[np.array(sizes) == 0])
    assert np.all(np.isfinite(dw))


@pytest.mark.few(name=("xla",))
@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_bfloat16_operands_are_summed_in_float32(name, rng):
    x, w, dy = draw(rng, jnp.bfloat16)
    sizes = np.array([100, 0, 30, 150], np.int32)
    made = with_gradients(IMPLEMENTATIONS[name])(x, w, sizes, dy)
    for one, other in zip(made, formula(x, w, sizes, dy), strict=True):
        assert one.dtype == jnp.bfloat16
        close(one, other, 2**-9)  # a rounding of each element, and no more


@pytest.mark.few(of_rows=("bfloat16",), stored=EIGHT_BITS[:1], name=("reference", "tpu"))
@pytest.mark.few(of_rows=("float32",), stored=EIGHT_BITS[1:], name=("xla",))
@pytest.mark.parametrize("of_rows", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", EIGHT_BITS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_weight_in_8_bits_is_the_one_of_its_values_and_gets_no_gradient(name, stored, of_rows, rng):
    x, w, dy = draw(rng, of_rows)
    w, sizes = np.clip(50 * w, -127, 127).astype(stored), np.array([100, 0, 30, 150], np.int32)

    @jax.jit
    def with_gradient(x, w, dy):
        y, backward = jax.vjp(lambda x: IMPLEMENTATIONS[name](x, w, sizes), x)
        return y, *backward(dy)

    for one, other in zip(with_gradient(x, w, dy), formula(x, w, sizes, dy)[:2], strict=True):
        assert one.dtype == x.dtype
        close(one, other, 2e-6 if of_rows == "float32" else 2**-9)


@pytest.mark.few(name=("xla", "tpu"), dtype=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_weights_of_some_groups_are_found_among_more(name, dtype, rng, monkeypatch):
    x, _, _ = draw(rng)
    more, layer = np.clip(50 * rng.normal(size=(3 * GROUPS, EMBED, OUT)), -127, 127).astype(dtype), rng.integers(3)
    sizes = np.array([100, 0, 30, 150], np.int32)
    monkeypatch.setattr(kernels, "_chosen", lambda *_: name)
    monkeypatch.setitem(kernels._OF_MORE, "tpu", partial(kernels._OF_MORE["tpu"], interpret=True))
    made = jax.jit(grouped_matmul)(x, more, sizes, jnp.int32(layer * GROUPS))
    own = more[layer * GROUPS : (layer + 1) * GROUPS]
    close(made, formula(x, own, sizes, np.zeros((ROWS, OUT)))[0], 2e-6)


def test_an_implementation_is_chosen_by_platform_and_said(rng):
    x, w, _ = draw(rng)
    sizes = np.zeros(GROUPS, np.int32)
    passed = " (not mosaic: it is for Hopper GPUs, and this is ; not tpu: this program is for a gpu)"
    for platform, name, why in (("tpu", "tpu", ""), ("gpu", "xla", passed), ("cpu", "xla", "")):
        with axes.activate(axes.Scope(SimpleNamespace(platform=platform, chip=""))) as scope:
            jax.make_jaxpr(lambda x, w: grouped_matmul(x, w, sizes))(x, w)
        assert scope.choices["grouped_matmul"] == f"{name}, 300 rows of 256 by 128 in 4 groups, float32{why}"


@pytest.mark.parametrize(
    ("embed", "dtype", "reason"),
    [
        (200, np.float32, "multiples of 128, not 200 and 128"),
        (128, np.float16, "bfloat16 or float32, not float16"),
    ],
)
def test_what_the_kernel_cannot_do_takes_xla_and_says_why(embed, dtype, reason):
    x, w = jnp.zeros((8, embed), dtype), jnp.zeros((2, embed, OUT), dtype)
    with axes.activate(axes.Scope(SimpleNamespace(platform="tpu"))) as scope:
        jaxpr = jax.make_jaxpr(lambda x, w: grouped_matmul(x, w, jnp.zeros(2, jnp.int32)))(x, w)
    assert "pallas_call" not in str(jaxpr)
    assert reason in scope.choices["grouped_matmul"]


@pytest.mark.parametrize(
    ("x", "w", "sizes", "reason"),
    [
        ((8, 4), (2, 5, 3), (2,), "x has an embed of 4, w of 5"),
        ((8, 4), (2, 4, 3), (3,), "w has 2 groups and there are 3 sizes"),
        ((8, 4), (4, 3), (2,), r"not x \(8, 4\), w \(4, 3\)"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused_with_their_numbers(x, w, sizes, reason):
    with pytest.raises(UserError, match=reason):
        grouped_matmul(jnp.zeros(x), jnp.zeros(w), jnp.zeros(sizes, jnp.int32))


def test_dtypes_that_do_not_go_together_are_refused():
    x, w = jnp.zeros((8, 4)), jnp.zeros((2, 4, 3), jnp.bfloat16)
    with pytest.raises(UserError, match="not float32 and bfloat16"):
        grouped_matmul(x, w, jnp.zeros(2, jnp.int32))
    with pytest.raises(UserError, match="sizes are int32, not float32"):
        grouped_matmul(x, x[None].swapaxes(1, 2), jnp.zeros(1))


def test_no_rows_give_no_rows_and_zero_gradients():
    x, w = jnp.zeros((0, 4)), jnp.ones((2, 4, 3))
    y, dx, dw = with_gradients(grouped_matmul)(x, w, jnp.zeros(2, jnp.int32), jnp.zeros((0, 3)))
    assert (y.shape, dx.shape) == ((0, 3), (0, 4))
    assert not np.any(dw)


@pytest.mark.parametrize("rows", [40, 0], ids=["xla", "reference"])
def test_the_weights_gradient_can_be_made_with_its_last_two_dimensions_swapped(rows, rng):
    x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, 6), (3, 6, 5), (rows, 5)))
    sizes = np.array([11, 0, 20] if rows else [0, 0, 0], np.int32)

    @jax.jit
    def plain_and_swapped(*operands):
        gradients = partial(grouped_matmul_gradients, *operands, jnp.float32)
        return gradients(), gradients(swapped=True)

    plain, swapped = plain_and_swapped(x, w, sizes, dy)
    np.testing.assert_array_equal(swapped[0], plain[0])
    np.testing.assert_allclose(swapped[1], np.swapaxes(plain[1], 1, 2), rtol=1e-5, atol=1e-5)
