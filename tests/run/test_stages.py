"""Stages: runs that are carried out before another, and named in it by their place."""

from dataclasses import replace

import jax
import pytest

from axon.checkpoint import Reader
from axon.data import Data
from axon.errors import UserError
from axon.run import Evaluation, InitFrom, Reference, program, session
from axon.run.stages import with_stages_done
from axon.train.distillation import Distillation


def test_folders_stand_in_the_place_of_stages_wherever_a_run_is_named(tiny):
    stages = {"one": tiny, "two": replace(tiny, run_dir="elsewhere")}
    references = {"teacher": Reference(tiny.model, "stage:two")}
    begins = {"stage:one": "runs/x/one", InitFrom("stage:two", ("*", "!head")): InitFrom("elsewhere", ("*", "!head"))}
    for begin, expected in begins.items():
        checked, done = [], []
        train = replace(tiny, stages=stages, run_dir="runs/x", init_from=begin, references=references)
        found = with_stages_done(train, checked.append, done.append)
        assert [one.run_dir for one in done] == ["runs/x/one", "elsewhere"]
        assert checked == [*done, found]
        assert found == replace(
            tiny, run_dir="runs/x", init_from=expected, references={"teacher": Reference(tiny.model, "elsewhere")}
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"init_from": "stage:bas"}, ("Train.init_from", "'stage:bas'", "'base'")),
        ({"init_from": InitFrom("stage:x")}, ("InitFrom.source", "'stage:x'")),
        ({"run_dir": "runs/stage"}, ("'base'", "one folder, 'runs/stage'", "--run-dir", "base/Train.run_dir")),
    ],
)
def test_a_stage_that_is_not_there_or_shares_a_folder_is_named_before_anything_runs(fields, said, tiny):
    stages = {"base": replace(tiny, run_dir="runs/stage")}
    train = replace(tiny, **{"stages": stages, "run_dir": "runs/x", **fields})
    with pytest.raises(UserError) as error:
        with_stages_done(train, lambda one: None, lambda stage: pytest.fail("ran"))
    for part in said:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"objective": Distillation()}, "'teacher'"), ({"evaluation": Evaluation(answers=3)}, "Evaluation.answers")],
    ids=["program", "data"],
)
def test_a_mistake_costs_none_of_the_stages_that_come_before(fields, said, tiny, do, tmp_path):
    train = replace(tiny, stages={"base": tiny}, init_from="stage:base", **fields)
    for order in (train, replace(tiny, stages={"good": tiny, "other": replace(tiny, **fields)})):
        with pytest.raises(UserError, match=said):
            do(order, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_and_functions_are_made_once_and_told_when_their_run_begins(tiny, do, tmp_path, monkeypatch):
    prepared, built, prepare = [], [], Data.prepare
    monkeypatch.setattr(Data, "prepare", lambda self, report: (prepared.append(self), prepare(self, report))[1])
    monkeypatch.setattr(session, "program", lambda train: (built.append(train), program(train))[1])
    short = replace(tiny, steps=1, evaluation=None)
    ran = do(replace(short, stages={"base": short, "other": short}, init_from="stage:base"), tmp_path / "run")
    assert len(prepared) == len(built) == 3
    told = [one.partition(":")[0] for one in ran.lines if one.startswith(("tokenizer: BPE", "model:"))]
    assert told == ["tokenizer", "model"] * 3


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_run_begins_with_what_its_stage_learned_and_continues_without_doing_it_again(tiny, do, few, tmp_path):
    stage = replace(tiny, steps=2, evaluation=None)
    teacher = {"teacher": Reference(tiny.model, "stage:base")}
    train = replace(
        stage,
        stages={"base": stage},
        init_from="stage:base",
        objective=Distillation(),
        references=teacher,
    )
    ran = do(train, tmp_path / "run", steps=1)
    ((_, divergence),) = ran.records("divergence")
    assert divergence == pytest.approx(0, abs=1e-6)  # of the teacher from itself
    again = do(train, tmp_path / "run")
    assert [step for step, *_ in again.records("loss")] == [1, 2]
    assert len([line for line in again.lines if "nothing left to train" in line]) == 1
    with few(1):
        abstract = program(stage).abstract_state()
    saved = Reader(tmp_path / "run" / "base" / "checkpoints").restore_parts({"parameters": abstract.parameters})
    assert jax.tree.leaves(saved)
