"""The dtype policy."""

import math

import jax
import jax.numpy as jnp
import pytest

from axon.errors import UserError
from axon.layout import Layout, sequence_parallel
from axon.precision import MXFP8, FP8Current, Int8, Precision
from axon.train.optimizers import SGD, Constant, Lion
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)


def program(layout, recipe):
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    precision = Precision(recipe=recipe)
    return Program(MODEL, layout, SGD(Constant(0.1)), batch=8, seq=16, precision=precision, devices=devices)


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")])
def test_auto_is_float32_on_cpu_and_bfloat16_on_accelerators(platform, dtype):
    assert Precision().compute_dtype(platform) == jnp.dtype(dtype)


def test_what_is_said_holds_on_every_platform_and_gradients_are_float32_unless_said():
    assert Precision("bfloat16").compute_dtype("cpu") == jnp.bfloat16
    assert Precision().reduce_dtype == jnp.float32
    assert Precision(reduce="bfloat16").reduce_dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("recipe", "needed", "able"),
    [
        (Int8(), "int8", "v6e"),
        (FP8Current(), "fp8", "h200"),
        (FP8Current(attention=True), "fp8 in attention", "; tpu7x has"),
        (MXFP8(), "blocks of 32", ""),
    ],
)
def test_a_chip_without_the_products_is_told_which_have_them(recipe, needed, able):
    with pytest.raises(UserError, match=rf"Precision.recipe.*{needed}.*'cpu'.*{able}.*{type(recipe).__name__}.emulate"):
        program(Layout({"data": 1}), recipe)


def test_rings_of_products_are_refused_by_both_names():
    layout = Layout({"data": 4, "tensor": 2}, rows=sequence_parallel(), overlap=("tensor",))
    with pytest.raises(UserError, match=r"Precision.recipe = Int8.*Layout.overlap"):
        program(layout, Int8(emulate=True))


def test_what_stays_is_printed():
    text = program(Layout({"data": 1}), Int8(emulate=True)).choices["weights"]
    assert text == "Int8, emulated: 7 of 12 parameters; embedding/table, head stay"
    some = program(Layout({"data": 1}), Int8(emulate=True, paths="layers/*/mlp/*")).choices["weights"]
    assert "3 of 12 parameters" in some
    assert "layers/block/attention/key" in some


def test_patterns_that_match_nothing_are_refused():
    with pytest.raises(UserError, match=r"Int8.paths.*'layer/\*'"):
        program(Layout({"data": 1}), Int8(emulate=True, paths="layer/*"))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [Layout({"data": 1}), Layout({"data": 2, "tensor": 2}, zero=3)], ids=["one", "split"]
)
def test_parameters_in_bfloat16_learn_by_steps_far_below_their_last_place(layout, rng, packed_batch):
    """To nearest they would stay as they are: each step is of 1e-5 of a number's size or less."""
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    drawn, losses = packed_batch(rng, 8, 16, MODEL.vocab), {}
    for stored in ("float32", "bfloat16"):
        options = {"precision": Precision(parameters=stored), "devices": devices, "batch": 8, "seq": 16}
        program = Program(MODEL, layout, Lion(Constant(1e-5), weight_decay=0.0), **options)
        state = program.init()
        assert {leaf.dtype for leaf in jax.tree.leaves(state.parameters)} == {jnp.dtype(stored)}
        batch, curve = program.place(drawn), []
        for _ in range(80):
            state, metrics = program.step(state, batch)
            curve.append(float(metrics["loss"]))
        losses[stored] = curve[0] - curve[-1]
    assert losses["float32"] > 0
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.2)
