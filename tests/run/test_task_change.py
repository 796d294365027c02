"""A tuned run on tasks of lm-eval's harness beside what it started from; what calls the harness is `full`."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from reports import silent
from typer.testing import CliRunner

from axon.cli import app
from axon.errors import UserError
from axon.nn.lora import LoRA
from axon.run import InitFrom
from axon.run.task_change import change_table, changes, evaluate_before_and_after, start_of
from axon.run.tasks import evaluate_tasks
from axon.train.optimizers import AdamW, Constant

TASK = """\
task: choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: '{data}'}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: 0
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}, {{metric: brier_score}}]
"""
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "iota", "kappa"]


@pytest.fixture
def folder(tmp_path, monkeypatch, rng):
    """A folder with one task, of random questions."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [[" ".join(rng.choice(WORDS, rng.integers(1, 4))) for _ in range(4)] for _ in range(12)]
    lines = [json.dumps({"question": question, "choices": choices}) + "\n" for question, *choices in texts]
    (tmp_path / "choice.jsonl").write_text("".join(lines))
    (tmp_path / "choice.yaml").write_text(TASK.format(data=tmp_path / "choice.jsonl"))
    return tmp_path


@pytest.fixture
def tuned(trained, do, tmp_path):
    """A run from the trained one, one step far from it."""
    optimizer = AdamW(Constant(0.3))
    train = replace(trained.train, init_from=str(trained.folder), steps=1, optimizer=optimizer, sample=None)
    return do(train, tmp_path / "tuned").folder


@pytest.mark.full
def test_both_sides_are_what_each_model_gets_alone(trained, tuned, folder, few):
    with few(1):
        found = evaluate_before_and_after(tuned, ["choice"], silent, folder=folder)
        alone = {
            "before": evaluate_tasks(trained.folder, ["choice"], silent, folder=folder),
            "after": evaluate_tasks(tuned, ["choice"], silent, folder=folder),
        }
    assert {side: found[side]["results"] for side in alone} == {side: one["results"] for side, one in alone.items()}
    accuracy = next(one for one in found["changes"] if one["metric"] == "acc")
    before, after = (one["results"]["choice"]["acc,none"] for one in alone.values())
    assert accuracy["difference"] == after - before
    # Of 12 documents the accuracies differ by one each at most, so that the paired error has a bound.
    assert 0 <= accuracy["difference_error"] <= 1 / math.sqrt(11)
    with few(1):
        options = ["--tasks", "choice", "--task-folder", str(folder), "--before"]
        shown = CliRunner().invoke(app, ["eval", str(tuned), *options], catch_exceptions=False).stdout.splitlines()
        printed = CliRunner().invoke(app, ["eval", str(tuned), *options, "--json"], catch_exceptions=False).stdout
    assert shown == change_table(found["changes"])
    assert json.loads(printed) == json.loads(json.dumps(found))


@pytest.mark.full
def test_beside_a_model_an_adapter_is_after_and_the_model_before(trained, do, folder, few, tmp_path):
    short = {"steps": 1, "optimizer": AdamW(Constant(0.3)), "sample": None}
    run = do(
        replace(trained.train, init_from=str(trained.folder), transforms=(LoRA(rank=2),), **short), tmp_path / "adapted"
    )
    adapter = str(run.folder)
    with few(1):
        beside = evaluate_before_and_after(trained.folder, ["choice"], silent, folder=folder, adapter=adapter)
        merged = evaluate_before_and_after(adapter, ["choice"], silent, folder=folder)
    assert beside["before"] == merged["before"]
    # Of probabilities: which choice is likeliest may be the same before and after, and a tie to either of the two.
    change, expected = (
        next(one["difference"] for one in each["changes"] if one["metric"] == "brier_score")
        for each in (beside, merged)
    )
    assert change == pytest.approx(expected, rel=1e-3)
    assert change


def results(task, values, error):
    return {
        "results": {task: {"acc,none": float(np.mean(values)), "acc_stderr,none": error, "words,none": 7.5}},
        "samples": {task: [{"doc_id": n, "filter": "none", "acc": float(v)} for n, v in enumerate(values)]},
    }


def test_the_error_of_a_difference_of_means_is_of_the_documents_differences(rng):
    before, after = rng.integers(0, 2, (2, 20))
    other = rng.permutation(20)
    sides = results("one", before, 0.3), results("one", after, 0.4)
    sides[1]["samples"]["one"] = [sides[1]["samples"]["one"][n] for n in other]  # in another order
    accuracy, words = changes(*sides)
    assert accuracy.difference == pytest.approx(np.mean(after) - np.mean(before))
    assert accuracy.difference_error == pytest.approx(np.std(after - before, ddof=1) / np.sqrt(20))
    assert (words.difference, words.difference_error) == (0.0, None)


def test_what_is_no_mean_of_documents_has_the_error_of_independent_values(rng):
    sides = [results("group", rng.random(5), error) for error in (0.3, 0.4)]
    for side in sides:
        side["samples"] = {}
    assert changes(*sides)[0].difference_error == pytest.approx(0.5)


def test_a_line_has_before_after_and_difference_in_columns():
    found = changes(results("one", [1, 0, 0, 0], 0.25), results("one", [1, 1, 1, 0], 0.25))
    head, accuracy, words = change_table([one._asdict() for one in found])
    assert head.split() == ["task", "metric", "before", "after", "difference"]
    assert accuracy == "one   acc     0.2500 ± 0.2500  0.7500 ± 0.2500  +0.5000 ± 0.2887"
    assert words.split() == ["one", "words", "7.5000", "7.5000", "+0.0000"]


def test_before_is_what_the_run_started_from(trained, monkeypatch):
    with pytest.raises(
        UserError, match=r"--before: .* began from initial values \(its Train\.init_from is None\).*leave"
    ):
        start_of(trained.folder)

    def started(init_from):
        monkeypatch.setattr("axon.run.trained.RunFolder.tree", lambda self: replace(trained.train, init_from=init_from))
        return start_of(trained.folder)

    assert started("runs/base") == ("runs/base", None)
    assert started(InitFrom("hf:base", adapter="hf:style")) == ("hf:base", "hf:style")


def test_a_model_of_the_hub_does_not_say_what_it_was_tuned_from(hub):
    with pytest.raises(UserError, match=r"--before: hf:.* does not say .* or a model with --adapter"):
        start_of(f"hf:{hub}")
