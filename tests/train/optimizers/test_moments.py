"""Moments in 8 bits and in bfloat16: what an update makes of them, where they lie, and what they cost."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn import ParamSpec
from axon.precision.dynamic_code import Blocks, decoded
from axon.precision.tensor_scale import Scaled, descaled
from axon.train.optimizers import SGD, SOAP, Adafactor, AdamW, Constant, Lion, Muon, ScheduleFreeAdamW, state_specs
from axon.train.optimizers.base import Rule
from axon.train.optimizers.moments import Moments, block_of
from axon.train.step import Program
from models.llama import Llama

RATE = Constant(0.01)
SIZES = {"layers": 2, "embed": 64, "heads": 4, "head_dim": 32, "mlp": 96, "experts": 2, "vocab": 80}


def spec(axes: str, sizes=SIZES, decay=True) -> ParamSpec:
    names = tuple(axes.split())
    stack, inputs = int(names[0] == "layers"), ("vocab",) if "vocab" in names else ("embed",)
    return ParamSpec(names, tuple(sizes[n] for n in names), jnp.float32, "params", stack, inputs, decay)


WIDE = {
    "embedding/table": spec("vocab embed"),
    "layers/expert": spec("layers experts embed mlp"),
    "layers/query": spec("layers embed heads head_dim"),
    "layers/scale": spec("layers embed", decay=False),
    "layers/up": spec("layers embed mlp"),
}
IN_BLOCKS = [
    AdamW(RATE, moments="dynamic8"),
    Lion(RATE, moments="dynamic8"),
    SGD(RATE, moments="dynamic8"),
    Adafactor(RATE, b1=0.9, moments="dynamic8"),
    Muon(RATE, AdamW(RATE, moments="dynamic8"), moments="dynamic8"),
    ScheduleFreeAdamW(RATE, moments="dynamic8"),
    SOAP(RATE, moments="dynamic8"),
]
IN_FP8 = [
    AdamW(RATE, moments="fp8"),
    Muon(RATE, AdamW(RATE, moments="fp8"), moments="fp8"),
    SOAP(RATE, moments="fp8"),
]


def named(optimizer):
    return f"{type(optimizer).__name__}, {optimizer.moments}"


def drawn(rng, steps=3):
    def draw():
        return {path: rng.normal(size=spec.shape).astype(np.float32) for path, spec in WIDE.items()}

    return draw(), [draw() for _ in range(steps)]


def is_narrow(leaf):
    return isinstance(leaf, Blocks | Scaled)


def test_blocks_reach_along_the_two_largest_axes_and_in_a_table_along_its_rows():
    sizes = {path: {WIDE[path].axes[d]: n for d, n in block_of(one).items()} for path, one in WIDE.items()}
    assert sizes == {
        "embedding/table": {"embed": 64},
        "layers/query": {"embed": 16, "head_dim": 16},
        "layers/up": {"embed": 16, "mlp": 16},
        "layers/expert": {"embed": 16, "mlp": 16},
        "layers/scale": {},
    }
    assert block_of(spec("embed mlp", {"embed": 24, "mlp": 64})) == {1: 64}
    assert block_of(spec("embed mlp", {"embed": 24, "mlp": 48})) == {}


def test_8_bits_take_a_quarter_and_their_scales_lie_with_their_codes():
    specs = state_specs(AdamW(RATE, moments="dynamic8"), WIDE)["direction"].mu
    up, table = specs["layers/up"], specs["embedding/table"]
    assert (up.codes.axes, up.codes.shape, up.codes.dtype) == (WIDE["layers/up"].axes, (2, 64, 96), jnp.int8)
    assert (up.scales.axes, up.scales.shape) == (WIDE["layers/up"].axes, (2, 4, 6))
    assert (table.scales.axes, table.scales.shape) == (("vocab", "_1"), (80, 1))
    assert specs["layers/scale"].dtype == jnp.float32
    placement = Placement.described(Layout({"data": 2, "tensor": 2}, zero=1), 4)
    held = sum(placement.bytes_per_device(leaf) for leaf in jax.tree.leaves(up))
    assert held == 64 * 96 * 2 // 4 * (1 + 4 / 256)


def test_fp8_takes_a_byte_and_two_and_a_scale_a_matrix():
    state = state_specs(AdamW(RATE, moments="fp8"), WIDE)["direction"]
    for path, counts in {"layers/up": (2, 1, 1), "layers/expert": (2, 2, 1, 1), "layers/scale": (2, 1)}.items():
        for kept, dtype in ((state.mu[path], jnp.float8_e4m3fn), (state.nu[path], jnp.float16)):
            assert (kept.values.axes, kept.values.shape) == (WIDE[path].axes, WIDE[path].shape)
            assert (kept.values.dtype, kept.scales.shape, kept.scales.dtype) == (dtype, counts, jnp.float32)
    placement = Placement.described(Layout({"data": 2, "tensor": 2}, zero=1), 4)
    held = sum(placement.bytes_per_device(leaf) for leaf in jax.tree.leaves((state.mu, state.nu)))
    whole = state_specs(AdamW(RATE), WIDE)["direction"].mu
    numbers = sum(placement.bytes_per_device(one) // 4 for one in whole.values())
    assert 3 * numbers < held < 3.01 * numbers


def test_values_in_fp8_are_those_of_the_formula_bit_for_bit_on_every_layout(rng, compiled, placed):
    """Scales too; no number that is not 0 becomes 0 without a sign."""
    x = rng.normal(size=WIDE["layers/up"].shape).astype(np.float32) * np.array([[[1e-3]], [[7.0]]], np.float32)
    x[1, 3, :50] *= 1e-12
    keep = {True: "mu", False: "nu"}
    for signed, dtype in ((True, ml_dtypes.float8_e4m3fn), (False, np.float16)):
        most, own = np.float32(1 / float(ml_dtypes.finfo(dtype).max)), x if signed else x**2
        scales = np.abs(own).max(axis=(1, 2), keepdims=True) * most
        values = own * (1 / scales)
        values = values if signed else np.where(values > 0, np.maximum(values, np.float32(2**-24)), values)
        store = partial(Moments("fp8", {keep[signed]: signed}).stored, parameters=WIDE, count=jnp.int32(1))
        for layout in ({"data": 1}, {"data": 2, "tensor": 2}):
            state = {keep[signed]: {"layers/up": own}}
            kept = compiled(placed(layout, zero=1), store, state)[keep[signed]]["layers/up"]
            np.testing.assert_array_equal(kept.scales, scales)
            np.testing.assert_array_equal(np.asarray(kept.values), values.astype(dtype))
            assert signed or (np.asarray(kept.values) > 0).all()


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("optimizer", IN_BLOCKS + IN_FP8, ids=named)
def test_a_first_step_is_that_of_float32_and_what_is_kept_of_it_is_near(optimizer, rng, moved):
    """An update is in float32 between what is kept, of which there is nothing before the first."""
    values, gradients = drawn(rng, steps=1)
    exact = moved(as_float32(optimizer), WIDE, values, gradients)
    made = moved(optimizer, WIDE, values, gradients)
    for path, value in made.values.items():
        np.testing.assert_allclose(value, exact.values[path], rtol=1e-6, atol=1e-7, err_msg=path)
    kept = jax.tree.leaves(made.state, is_leaf=is_narrow)
    whole = jax.tree.leaves(exact.state)
    assert sum(map(is_narrow, kept)) >= 1
    for one, other in zip(kept, whole, strict=True):
        largest = np.abs(other).max()
        if isinstance(one, Blocks):
            assert (np.abs(decoded(one) - other) <= 0.01 * largest).all()
        if isinstance(one, Scaled):
            signed = one.values.dtype == jnp.float8_e4m3fn
            relative, least = (2**-4, 2**-10 / 448) if signed else (2**-11, 2**-24 / 65504)
            bound = np.maximum(relative * np.abs(other), least * largest)
            assert (np.abs(descaled(one) - other) <= 1.001 * bound).all()


def as_float32(optimizer):
    plain = replace(optimizer, moments="float32")
    return replace(plain, rest=replace(plain.rest, moments="float32")) if isinstance(plain, Muon) else plain


def test_a_moment_decays_in_bfloat16_as_it_does_in_float32(rng, moved):
    """To nearest, steps of less than half of a last place would be lost, and it would stay where it is."""
    optimizer = SGD(RATE, momentum=0.999, moments="bfloat16")
    values, gradients = drawn(rng, steps=1)
    zeros = [{path: np.zeros_like(value) for path, value in values.items()}] * 300
    state = moved(optimizer, WIDE, values, gradients + zeros).state
    leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.bfloat16]
    assert len(leaves) == len(WIDE)
    for leaf, path in zip(leaves, WIDE, strict=True):
        start, end = gradients[0][path], np.float32(leaf)
        assert abs(np.vdot(end, start) / np.vdot(start, start) - 0.999**300) < 0.02


def test_values_in_bfloat16_take_steps_far_below_their_last_place(rng, moved):
    narrow = {path: replace(one, dtype=jnp.bfloat16) for path, one in WIDE.items()}
    values = {path: np.ones(one.shape, np.float32) for path, one in WIDE.items()}
    gradients = [{path: np.ones(one.shape, np.float32) for path, one in WIDE.items()}] * 100
    made = moved(SGD(Constant(1e-4), momentum=0.0), narrow, values, gradients).values
    for path, value in made.items():
        assert value.dtype == jnp.bfloat16
        spread = 2**-8 * (100 * 0.0256) ** 0.5  # of a sum of 100 steps: one in 39 goes down, by a last place
        assert abs(np.float32(value).mean() - 0.99) < 6 * spread / np.sqrt(value.size / 2), path


def test_blocks_that_no_device_has_whole_are_refused(rng):
    model = Llama(vocab=64, embed=32, layers=1, heads=2, kv_heads=2, mlp=64)
    layout = Layout({"data": 4}, zero=1)
    program = Program(model, layout, IN_BLOCKS[0], batch=4, seq=16, devices=jax.devices()[:4])
    with pytest.raises(UserError, match=r"dynamic8.*16 elements along 'embed'.* 8 on each of 4.*Layout.optimizer"):
        program.init()


@pytest.mark.full
@pytest.mark.parametrize("moments", ["dynamic8", "bfloat16", "fp8"])
def test_a_model_learns_as_with_moments_in_float32(moments, rng, packed_batch):
    """The same sequences again and again, by heart: as fast."""
    drawn = packed_batch(rng, 4, 32, 64)
    model = Llama(vocab=64, embed=64, layers=2, heads=2, kv_heads=2, mlp=128)
    losses = {}
    for form in ("float32", moments):
        optimizer = AdamW(Constant(3e-3), moments=form)
        program = Program(model, Layout(), optimizer, batch=4, seq=32, devices=jax.devices()[:1])
        batch = program.place(drawn)
        state, curve = program.init(), []
        for _ in range(24):
            state, metrics = program.step(state, batch)
            curve.append(float(metrics["loss"]))
        losses[form] = np.asarray(curve)
    assert losses["float32"][-1] < 0.7 * losses["float32"][0]
    np.testing.assert_allclose(losses[moments], losses["float32"], rtol=0.05, atol=0.02)


def test_an_optimizer_that_names_no_moments_keeps_them_in_float32():
    @dataclass(frozen=True)
    class Unnamed(Rule):
        pass

    assert Unnamed(RATE).moments == "float32"
    with pytest.raises(UserError, match=r"Unnamed.moments = 'dynamic8', and Unnamed.signed .*'float32'"):
        Unnamed(RATE, moments="dynamic8")
