"""The kernel that rounds in one pass: bit for bit what two passes make, whoever shares a scale."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon import axes
from axon.kernels.quantize.tpu import BLOCK, _block, quantize_tpu, unfit
from axon.precision.formats import Format, largest_magnitudes, quantized
from axon.precision.operation import rounded

SHARED = {
    "tokens": ((2, 64, 256), (2,)),
    "columns of a sequence": ((2, 96, 256), (1,)),
    "tokens of heads": ((2, 64, 3, 128), (2, 3)),
    "columns of heads": ((2, 64, 3, 128), (1,)),
    "sequences": ((3, 32, 256), (1, 2)),
}


@pytest.fixture(params=SHARED)
def case(request, rng):
    """Numbers of many magnitudes, where some that share a scale are 0, and who shares one."""
    shape, shared = SHARED[request.param]
    spread = 10.0 ** rng.uniform(-6, 6, tuple(1 if i in shared else n for i, n in enumerate(shape)))
    x = (rng.normal(size=shape) * spread).astype(np.float32)
    x[tuple(slice(None) if i in shared else 0 for i in range(len(shape)))] = 0
    return x, shared


def in_one_pass(x, shared, form, interpret=True):
    return quantize_tpu(jnp.asarray(x), shared, form, interpret=interpret)


def in_two(x, shared, form):
    counts = tuple(1 if i in shared else n for i, n in enumerate(x.shape))
    return jax.jit(lambda x: quantized(x, form, largest_magnitudes(x, counts)))(x)


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_one_pass_rounds_as_two_do_bit_for_bit(case, dtype):
    x, shared = case
    form = Format(dtype, "row")
    assert_same(in_one_pass(x, shared, form), in_two(x, shared, form))


def test_bfloat16_is_rounded_bit_for_bit_too(case):
    x, shared = jnp.asarray(case[0], jnp.bfloat16), case[1]
    form = Format("int8", "row")
    assert_same(in_one_pass(x, shared, form), in_two(x, shared, form))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_makes_its_own_scale_not_a_number_and_no_other(value, case, rng):
    x, shared = case
    place = tuple(int(rng.integers(n)) for n in x.shape)
    x[place] = value
    scales = np.asarray(in_one_pass(x, shared, Format("int8", "row")).scales)
    own = tuple(0 if i in shared else n for i, n in enumerate(place))
    assert np.isnan(scales[own])
    assert np.isnan(scales).sum() == 1


def test_the_kernel_has_no_race(case, watched):
    x, shared = case
    form = Format("int8", "row")
    assert_same(in_one_pass(x, shared, form, watched), in_two(x, shared, form))


@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=2),
    st.integers(1, 300),
    st.integers(1, 500),
    st.sets(st.integers(0, 3)),
)
def test_blocks_hold_all_that_share_a_scale_divide_the_array_and_have_room(leading, rows, columns, shared):
    shape = (*leading, 32 * rows, 128 * columns)
    shared = tuple(sorted(i for i in shared if i < len(shape)))
    block = _block(shape, shared)
    assert (unfit(shape, shared) is None) == bool(block) or len(shape) == 4
    if not block:
        return
    order = range(len(shape)) if len(shape) < 4 else (0, 2, 1, 3)
    laid_out = [shape[i] for i in order]
    assert np.prod(block) <= BLOCK
    for i, size, part in zip(order, laid_out, block, strict=True):
        assert size % part == 0
        assert part == size or i not in shared


@pytest.mark.parametrize(
    ("shape", "shared", "reason"),
    [
        ((2, 40, 256), (2,), "the last two axes are multiples of 32 and 128, not 40 × 256"),
        ((2, 64, 200), (2,), "the last two axes are multiples of 32 and 128, not 64 × 200"),
        ((2, 2**17, 128), (1,), "131,072 numbers share a scale, too many for VMEM"),
        ((128,), (0,), "the last two axes are multiples of 32 and 128, not 128"),
    ],
)
def test_what_the_kernel_cannot_round_is_said(shape, shared, reason):
    assert unfit(shape, shared) == reason


@pytest.mark.parametrize(
    ("platform", "share", "chosen"),
    [
        ("tpu", "row", "tpu, int8"),
        ("tpu", 128, "xla, int8 (not tpu: numbers share a scale in blocks)"),
        ("gpu", "row", "xla, int8 (not tpu: this program is for a gpu)"),
        ("cpu", "row", "xla, int8"),
    ],
)
def test_it_is_chosen_on_tpus_and_said(platform, share, chosen):
    names, spec = ("batch", "seq", "embed"), jax.sharding.PartitionSpec(None, None, None)
    x = jax.ShapeDtypeStruct((2, 64, 256), jnp.bfloat16)
    with axes.activate(axes.Scope(SimpleNamespace(platform=platform, chip="TPU v6e"))) as scope:
        jax.make_jaxpr(lambda x: rounded(x, names, Format("int8", share), ("batch", "seq"), spec, spec).array)(x)
    assert scope.choices["quantize"] == chosen
