"""A run that continues another's state under a schedule of its own."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from axon.checkpoint import Checkpoints, Reader
from axon.errors import UserError
from axon.foreign_json import read_json
from axon.observe.metrics import read_metrics
from axon.run import InitFrom
from axon.run.folder import RunFolder
from axon.run.reporting import RunReport
from axon.train.optimizers import WSD, AdamW, Constant


def branch(train, source, **fields):
    return replace(train, init_from=InitFrom(str(source), optimizer=True, **fields), checkpoints=Checkpoints(every=3))


def records(folder, *names):
    return [[row[n] for n in ("step", *names)] for row in read_metrics(folder / "metrics.jsonl") if names[0] in row]


def values(folder, step):
    reader = Reader(folder / "checkpoints")
    leaves = reader.saved_leaves(step)
    return {path: reader.load_leaf(step, path, leaf) for path, leaf in leaves.items()}


@pytest.fixture(scope="module")
def stable(tiny, do, tmp_path_factory):
    """A run of 10 of its steps at one rate, saved every five."""
    train = replace(tiny, optimizer=AdamW(Constant(1e-2)), evaluation=None)
    return do(train, tmp_path_factory.mktemp("stable") / "run", steps=10)


@pytest.mark.full
def test_a_branch_under_the_same_schedule_continues_bit_for_bit_as_the_run_itself(stable, do, tmp_path):
    whole = do(stable.train, shutil.copytree(stable.folder, tmp_path / "whole"))
    begun = do(branch(stable.train, stable.folder, step=5), tmp_path / "branch", steps=7)
    continued = do(begun.train, begun.folder)  # its own checkpoints are what it continues from
    numbers = ("loss", "grad_norm", "learning_rate", "tokens")
    assert records(continued.folder, *numbers) == records(whole.folder, *numbers)[5:]
    mine, theirs = values(continued.folder, 12), values(whole.folder, 12)
    assert mine.keys() == theirs.keys()
    for path in mine:
        np.testing.assert_array_equal(mine[path], theirs[path])
    assert not any("lacks" in line for line in continued.lines)


@pytest.mark.full
def test_a_cool_down_has_the_moments_of_the_stable_run_and_its_record_the_lineage(stable, do, tmp_path):
    decaying = replace(stable.train, optimizer=AdamW(WSD(peak=1e-2, warmup=0, steps=14, decay=4)), steps=14)
    parent = shutil.copytree(stable.folder, tmp_path / "parent")
    cool = do(branch(decaying, parent), tmp_path / "cool", steps=11)
    assert records(cool.folder, "learning_rate")[0] == [11, pytest.approx(1e-2)]
    said = "\n".join(cool.lines)
    assert f"continues from step 10 of {parent}, with the optimizer's state; batches are those that follow" in said
    assert "differs in optimizer.schedule: @Constant() → @WSD()" in said
    shutil.rmtree(parent)  # it has what it began with
    do(cool.train, cool.folder)
    assert records(cool.folder, "learning_rate")[-1][1] == pytest.approx(2.5e-3)
    mine, begun = values(cool.folder, 12), values(stable.folder, 10)
    moments = [path for path in begun if "/mu/" in path]
    assert moments
    assert all(np.any(mine[path]) for path in moments)
    lineage = read_json(cool.folder / "run.json")["parent"]
    assert lineage["run"] == RunFolder(stable.folder).identifier()
    assert (lineage["step"], lineage["folder"]) == (10, str(parent))
    assert Reader(cool.folder / "checkpoints").extra()["parent"] == lineage
    assert RunReport(cool.folder).lines()[-1].startswith(f"begun from step 10 of run {lineage['run']} in {parent}")


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_branch_of_other_data_or_seed_says_so(stable, do, tmp_path):
    other = do(branch(replace(stable.train, seed=1), stable.folder), tmp_path / "run", steps=11)
    assert any("data or seed differ, so batches are those from step 10 on" in line for line in other.lines)


@pytest.mark.parametrize(
    ("change", "fields", "says"),
    [
        (lambda t: replace(t, steps=10), {}, "Train.steps is 10, and the state in .* is of step 10"),
        (lambda t: t, {"step": 4}, "no checkpoint of step 4 in .*; there are"),
        (lambda t: replace(t, model=replace(t.model, mlp=96)), {}, "InitFrom.optimizer = True: .*does not fit"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(change, fields, says, stable, do, tmp_path):
    with pytest.raises(UserError, match=says):
        do(branch(change(stable.train), stable.folder, **fields), tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_parts_of_a_state_are_no_branch():
    with pytest.raises(UserError, match=r"leave out InitFrom\.paths"):
        InitFrom("runs/a", ("embedding/*",), optimizer=True)
    with pytest.raises(UserError, match=r"InitFrom\.step is of InitFrom\.optimizer = True"):
        InitFrom("runs/a", step=3)
