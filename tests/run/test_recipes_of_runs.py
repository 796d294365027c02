"""Runs by a recipe, or in float16: stopped and continued, and begun from one with another."""

from dataclasses import replace

import numpy as np
import pytest
from reports import silent

from axon.checkpoint import Checkpoints, Reader
from axon.errors import UserError
from axon.precision import FP8Delayed, Int8, LossScale, Precision
from axon.run import InitFrom
from axon.run.build import program
from axon.run.initial_values import InitialValues
from axon.runtime import flattened

pytestmark = [pytest.mark.full, pytest.mark.draws(1)]

OVERFLOWING = Precision("float16", loss_scale=LossScale(initial=2.0**8, factor=2.0**8, every=1))
RECIPE = Precision(recipe=FP8Delayed(emulate=True, history=2))


@pytest.fixture(scope="module", params=[OVERFLOWING, RECIPE], ids=["float16", "FP8Delayed"])
def short(request, tiny):
    return replace(tiny, precision=request.param, steps=6, checkpoints=Checkpoints(every=3), evaluation=None)


def saved(folder, step):
    """Every array of a checkpoint: the scale and recorded magnitudes too."""
    reader = Reader(folder / "checkpoints")
    return {path: reader.load_leaf(step, path, leaf) for path, leaf in reader.saved_leaves(step).items()}


def test_a_stopped_run_continues_bit_for_bit(short, do, tmp_path):
    whole, _ = do(short, tmp_path / "whole"), do(short, tmp_path / "run", steps=3)
    continued = do(short, tmp_path / "run")
    numbers = ("loss", "grad_norm", *(["loss_scale", "overflow"] if short.precision.loss_scale else []))
    assert continued.records(*numbers) == whole.records(*numbers)
    if short.precision.loss_scale:
        assert {record[-1] for record in whole.records(*numbers)} == {0, 1}
    expected, actual = saved(whole.folder, 6), saved(continued.folder, 6)
    assert any("amax" in path or "loss_scale" in path for path in expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(actual[path], value, err_msg=path)


def test_another_recipe_is_another_run_which_may_begin_from_the_weights_of_this(short, do, few, tmp_path):
    ran = do(short, tmp_path / "run", steps=3)
    own = saved(ran.folder, 3).items()
    expected = {
        path.removeprefix("parameters/").removesuffix("/base"): x for path, x in own if path.startswith("parameters/")
    }
    for other in (Precision(), Precision(recipe=Int8(emulate=True))):
        with pytest.raises(UserError, match=r"differs in\n  precision\."):
            do(replace(short, precision=other), tmp_path / "run")
        begun = replace(short, precision=other, init_from=InitFrom(str(ran.folder)))
        with few(1):
            runtime = program(begun).runtime
            actual = flattened(InitialValues.of(begun, runtime, silent).read(runtime, 7, silent))
        assert {path.removesuffix("/base") for path in actual} == expected.keys()
        for path, value in actual.items():
            np.testing.assert_array_equal(value, expected[path.removesuffix("/base")], err_msg=path)
