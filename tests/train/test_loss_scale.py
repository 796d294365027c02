"""Training in float16: a scaled loss learns what float32 does, and an overflow changes nothing but the scale."""

from itertools import pairwise

import jax
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout
from axon.precision import LossScale, Precision
from axon.runtime import flattened
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

MODEL = Llama(vocab=64, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)
ONE = Layout({"data": 1})
SPLIT = Layout({"data": 4, "tensor": 2}, zero=3, microbatches=2)
BATCH, SEQ = 8, 16


def program(layout=ONE, precision=Precision(), **options):
    devices = jax.devices()[: int(np.prod([*layout.mesh.values()]))]
    options = {"batch": BATCH, "seq": SEQ, "precision": precision, "devices": devices, **options}
    return Program(MODEL, layout, AdamW(Constant(1e-2), eps=1e-6), **options)


def scaled(**fields):
    return Precision("float16", loss_scale=LossScale(**fields))


def trained(program, packed_batch, seed, steps):
    """State and metrics of steps on one batch, the metrics of all."""
    state, rng, metrics = program.init(), np.random.default_rng(seed), []
    batch = program.place(packed_batch(rng, BATCH, SEQ, MODEL.vocab))
    for _ in range(steps):
        state, found = program.step(state, batch)
        metrics.append({name: float(value) for name, value in found.items() if name != "norms"})
    return state, metrics


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("layout", [ONE, SPLIT], ids=["one device", "split"])
def test_a_scaled_loss_learns_what_float32_learns(layout, packed_batch, seed):
    _, expected = trained(program(), packed_batch, seed, 10)
    _, metrics = trained(program(layout, scaled(initial=2.0**8, every=4)), packed_batch, seed, 10)
    assert [one["loss_scale"] for one in metrics] == [2.0 ** (8 + n // 4) for n in range(10)]
    np.testing.assert_allclose(metrics[0]["grad_norm"], expected[0]["grad_norm"], rtol=1e-2)
    for one, other in zip(metrics, expected, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=5e-2)


@pytest.mark.full
@pytest.mark.draws(1)
def test_an_overflow_lowers_the_scale_changes_nothing_else_and_is_recovered_from(packed_batch, seed):
    one = program(precision=scaled(initial=2.0**30))
    start = jax.device_get(one.init())
    state, metrics = trained(one, packed_batch, seed, 3)
    assert [(m["overflow"], m["loss_scale"], m["grad_norm"]) for m in metrics] == [(1, 2.0**n, 0) for n in (30, 29, 28)]
    assert int(state.step) == 3
    for path, value in flattened(start.parameters).items():
        np.testing.assert_array_equal(flattened(state.parameters)[path], value, err_msg=path)
    assert float(state.optimizer["loss_scale"]) == 2.0**27
    _, metrics = trained(one, packed_batch, seed, 25)
    for one, following in pairwise(metrics):
        assert following["loss_scale"] == one["loss_scale"] / 2 ** one["overflow"]
    assert 0 in [one["overflow"] for one in metrics[-2:]]  # a gradient that has grown costs a step, and no more
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.full
@pytest.mark.draws(1)
def test_an_overflow_at_the_floor_is_the_fault_that_it_is(packed_batch, seed):
    _, metrics = trained(program(precision=scaled(initial=2.0**40, floor=2.0**40)), packed_batch, seed, 1)
    assert not np.isfinite(metrics[0]["grad_norm"])
    assert metrics[0]["overflow"] == 1


@pytest.mark.parametrize("precision", [Precision("float16"), Precision(loss_scale=LossScale())])
def test_float16_and_a_scale_come_together(precision):
    with pytest.raises(UserError, match=r"Precision.compute = .*Precision.loss_scale"):
        program(precision=precision)


@pytest.mark.parametrize(("field", "value"), [("initial", 0.5), ("factor", 1.0), ("every", 0), ("floor", 0.0)])
def test_a_field_that_cannot_be_meant_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=rf"LossScale.{field} is {value}"):
        LossScale(**{field: value})
