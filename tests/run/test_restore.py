"""What a run leaves to evaluation and generation where its optimizer averages."""

from dataclasses import replace
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reports import silent

from axon.checkpoint import Checkpoints, Reader, Store
from axon.layout import Layout
from axon.run import Sample, program
from axon.run.inspect import evaluate_run, generate_text
from axon.run.restore import restore_evaluated
from axon.run.session import sample_text
from axon.runtime import Runtime, flattened, nested
from axon.serve.request import Sampling
from axon.train.optimizers import EMA, AdamW, Constant
from axon.train.step import Program
from models.llama import Llama


@pytest.fixture(scope="module")
def averaged(tiny, do, tmp_path_factory):
    """The tiny run with an average far from its last values."""
    return do(replace(tiny, optimizer=EMA(tiny.optimizer, decay=0.99)), tmp_path_factory.mktemp("runs") / "averaged")


@pytest.fixture(scope="module")
def left(averaged, few):
    """The program, and the state of its last checkpoint."""
    with few(1):
        made = program(averaged.train)
        return made, Reader(averaged.folder / "checkpoints").restore(made.abstract_state())[0]


@pytest.mark.full
def test_the_average_is_restored_where_there_is_one(averaged, left):
    made, state = left
    values, _ = restore_evaluated(Reader(averaged.folder / "checkpoints"), made.runtime, averaged.train.optimizer)
    for path, value in flattened(values).items():
        np.testing.assert_array_equal(value, state.optimizer["average"][path], err_msg=path)
        assert value.sharding.is_equivalent_to(flattened(made.abstract_state().parameters)[path].sharding, value.ndim)


@pytest.mark.parametrize("which", ["trained", "averaged"])
def test_weights_that_nothing_trains_are_cast_as_they_are_restored(which, request):
    ran = request.getfixturevalue(which)

    def restored(weights):
        runtime = Runtime(ran.train.model, Layout(), weights=weights, devices=jax.devices()[:1])
        return flattened(restore_evaluated(Reader(ran.folder / "checkpoints"), runtime, ran.train.optimizer)[0])

    whole, halved = restored(None), restored(jnp.bfloat16)
    for path, value in whole.items():
        assert (value.dtype, halved[path].dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_array_equal(halved[path], np.asarray(value).astype(jnp.bfloat16), err_msg=path)


@pytest.mark.full
def test_what_was_padded_for_stages_is_evaluated_on_one_device(tmp_path):
    model = Llama(vocab=64, embed=16, layers=3, heads=2, kv_heads=2, mlp=24)
    optimizer = EMA(AdamW(Constant(1e-3)))
    stages = Layout({"pipe": 2}, microbatches=2, pad_layers=True)
    padded = Program(model, stages, optimizer, batch=4, seq=8, devices=jax.devices()[:2])
    state = padded.init()
    with Store(tmp_path, Checkpoints()) as store:
        store.save(1, state, {}, padded.specs)
    one = Runtime(model, Layout({"data": 1}), devices=jax.devices()[:1])
    values, _ = restore_evaluated(Reader(tmp_path), one, optimizer)
    for path, value in flattened(one.initialise(0)[0]).items():
        np.testing.assert_array_equal(flattened(values)[path], value, err_msg=path)


def test_evaluation_uses_the_average(averaged, left, few):
    made, state = left
    with few(1):
        loss = evaluate_run(averaged.folder, None, 2, silent).loss
    batches = [made.place(batch) for batch in islice(averaged.train.data.prepare(silent).held_out(), 2)]

    def mean(parameters):
        sums = [jax.device_get(made.evaluator(parameters, batch)["loss"]) for batch in batches]
        return np.sum(sums, axis=0)[0] / np.sum(sums, axis=0)[1]

    assert loss == pytest.approx(mean(nested(state.optimizer["average"])), rel=1e-6)
    assert loss != pytest.approx(mean(state.parameters), rel=1e-3)


@pytest.mark.full
def test_generation_uses_the_average(averaged, left, few):
    made, state = left
    sample = Sample("alpha", Sampling(tokens=30, temperature=1.0))
    tokenizer = averaged.train.data.prepare(silent).tokenizer
    ours, trained = (
        sample_text(made.runtime, values, state.variables, tokenizer, sample)
        for values in (nested(state.optimizer["average"]), state.parameters)
    )
    with few(1):
        assert generate_text(averaged.folder, "alpha", sample.sampling, silent) == ours
    assert ours != trained
