"""Runs whose replicas train apart: stopped, continued, looked at, and put on another number of replicas."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from axon.checkpoint import Reader
from axon.errors import UserError
from axon.layout import Layout, LayoutError
from axon.observe.metrics import read_metrics
from axon.parallel.outer import DiLoCo, SlowMo
from axon.run import program
from axon.run.inspect import evaluate_run
from axon.train.optimizers import OneBitAdam

METHODS = ["DiLoCo", "OneBitAdam"]


def with_method(tiny, method):
    tiny = replace(tiny, layout=Layout({"replica": 2}))
    if method == "DiLoCo":
        return replace(tiny, outer=DiLoCo(every=4))
    return replace(tiny, optimizer=OneBitAdam(tiny.optimizer.schedule, warmup=3))


def records(folder):
    numbers = ("step", "loss", "grad_norm", "learning_rate", "tokens", "eval_loss")
    return [[record.get(name) for name in numbers] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module", params=METHODS)
def whole(request, tiny, do, tmp_path_factory):
    """A run of each method, never stopped; only to be looked at."""
    return do(with_method(tiny, request.param), tmp_path_factory.mktemp("whole"), devices=2)


@pytest.mark.full
def test_a_run_that_was_stopped_within_a_round_and_continued_is_bit_identical(whole, do, few, tmp_path):
    tree = replace(whole.train, run_dir=None)
    do(tree, tmp_path, devices=2, steps=6)
    continued = do(tree, tmp_path, devices=2)
    assert "resumed from step 6" in continued.lines
    losses = [record for record in records(tmp_path) if record[1] is not None]
    assert losses == [record for record in records(whole.folder) if record[1] is not None]
    with few(2):
        state = program(whole.train).abstract_state()
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
    ours, theirs = (Reader(folder / "checkpoints").restore(abstract)[0] for folder in (tmp_path, whole.folder))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.full
def test_evaluation_on_one_device_is_that_of_the_run(whole, few):
    with few(1):
        loss = evaluate_run(whole.folder, None, whole.train.evaluation.batches, lambda line: None).loss
    last = [record[-1] for record in records(whole.folder) if record[-1] is not None][-1]
    assert loss == pytest.approx(last, rel=1e-5)


@pytest.mark.full
def test_another_number_of_replicas_is_refused(whole, do):
    other = replace(whole.train, layout=Layout({"replica": 4}), run_dir=None)
    with pytest.raises(UserError, match=r"'replica' 2 in the checkpoint and 4 here\. Set Layout.mesh as it was"):
        do(other, whole.folder, devices=4)


@pytest.mark.full
def test_a_run_that_starts_from_another_gives_its_parameters_to_every_replica(tiny, trained, do, tmp_path):
    from_trained = replace(with_method(tiny, "DiLoCo"), init_from=str(trained.folder), sample=None)
    do(from_trained, tmp_path, devices=2, steps=1)
    first = read_metrics(tmp_path / "metrics.jsonl")[0]["loss"]
    assert first < 0.8 * read_metrics(trained.folder / "metrics.jsonl")[0]["loss"]


def test_an_outer_method_without_replicas_is_refused_before_there_is_a_folder(tiny, do, tmp_path):
    with pytest.raises(LayoutError, match=r"SlowMo .* no mesh axis 'replica'"):
        do(replace(tiny, outer=SlowMo(every=4)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_steps_that_end_within_a_round_are_refused(tiny):
    with pytest.raises(UserError, match=r"the last 2 would not reach the parameters. Set Train.steps to 15"):
        replace(tiny, outer=DiLoCo(every=5))
