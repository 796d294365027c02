"""`FP8Current.attention`: attention's products in FP8 as a part of a recipe."""

import math

import jax
import pytest

from axon.errors import UserError
from axon.layout import Layout
from axon.precision import FP8Current, Precision
from axon.train.optimizers import SGD, Constant
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)
ATTENTION = FP8Current(emulate=True, attention=True)


def program(layout, recipe=ATTENTION, seq=512, model=MODEL):
    devices = jax.devices()[: math.prod(layout.mesh.values())]
    precision = Precision(recipe=recipe)
    return Program(model, layout, SGD(Constant(0.1)), batch=4, seq=seq, precision=precision, devices=devices)


@pytest.mark.parametrize("recipe", [ATTENTION, FP8Current(emulate=True)], ids=["fp8", "compute"])
def test_the_log_says_what_attention_is_multiplied_in(recipe):
    made = program(Layout({"data": 1}), recipe, seq=64)
    made.trace()
    assert ("FP8, emulated" in made.choices["attention"]) == recipe.attention


def test_parts_of_a_sequence_that_blocks_do_not_divide_are_refused():
    with pytest.raises(UserError, match=r"runs of 128 positions, which blocks of 256.*FP8Current.attention"):
        program(Layout({"context": 2}, context="ring")).trace()


def test_layers_that_stay_are_refused():
    with pytest.raises(UserError, match=r"FP8Current.attention and FP8Current.first = 1"):
        FP8Current(attention=True, first=1)


@pytest.mark.slow
@pytest.mark.draws(1)
@pytest.mark.parametrize(
    "layout",
    [Layout({"data": 2, "tensor": 2}, zero=3), Layout({"context": 2}, context="ulysses")],
    ids=["data, tensor", "ulysses"],
)
def test_layouts_agree_on_losses(layout, rng, packed_batch):
    """But for what falls to the other neighbour in e4m3 by rounding of float32."""
    batch = packed_batch(rng, 4, 512, 64)

    def losses(layout):
        made = program(layout)
        state, found = made.init(), []
        for _ in range(2):
            state, metrics = made.step(state, made.place(batch))
            found.append(float(metrics["loss"]))
        return found

    assert losses(layout) == pytest.approx(losses(Layout({"data": 1})), rel=1e-3)
