"""A run beside a frozen teacher: by configuration alone, its teacher another run of another size."""

import json
from dataclasses import replace

import numpy as np
import pytest
from reports import silent

from axon.checkpoint import Reader
from axon.config import dump, load
from axon.errors import UserError
from axon.layout import Layout
from axon.nn import Routing
from axon.plan.memory import arguments
from axon.run import Reference, program
from axon.run.folder import RunFolder
from axon.run.inspect import evaluate_run
from axon.run.references import read_references, sources_of
from axon.runtime import flattened, nested
from axon.train.distillation import Distillation
from axon.train.objective import NextToken
from models.mixtral import Mixtral

SPLIT = Layout({"data": 2, "tensor": 2}, zero=3)


@pytest.fixture(scope="module")
def student(trained):
    """A run of half the width, taught by the trained one."""
    train = trained.train
    return replace(
        train,
        model=replace(train.model, embed=train.model.embed // 2),
        objective=Distillation(2.0, divergence="reverse", next_token=0.5),
        references={"teacher": Reference(train.model, str(trained.folder))},
        layout=SPLIT,
        steps=6,
        sample=None,
    )


@pytest.fixture(scope="module")
def taught(student, do, tmp_path_factory):
    return do(student, tmp_path_factory.mktemp("runs") / "taught", devices=4)


def stored(ran, few):
    """The last checkpoint's parameters, by path."""
    with few(4):
        abstract = program(ran.train).abstract_state().parameters
        found = Reader(ran.folder / "checkpoints").restore_parts({"parameters": abstract})
    return flattened(found["parameters"])


def test_its_file_is_the_same_tree(student, tmp_path):
    file = tmp_path / "run.gin"
    file.write_text(dump(student))
    assert load(file).tree == student


@pytest.mark.full
def test_a_stopped_run_continues_bit_for_bit(taught, student, do, few, tmp_path):
    do(student, tmp_path / "run", devices=4, steps=3)
    ran = do(student, tmp_path / "run", devices=4)
    for (path, one), other in zip(stored(ran, few).items(), stored(taught, few).values(), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=path)


@pytest.mark.full
def test_it_is_evaluated_beside_its_teacher(taught, few):
    with few(4):
        found = evaluate_run(str(taught.folder), None, taught.train.evaluation.batches, silent)
    last = json.loads((taught.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert found.loss == pytest.approx(last["eval_loss"], rel=1e-5)


def test_the_teachers_bytes_are_counted_and_in_no_state(student, few):
    with few(4):
        made = program(student)
        plain = program(replace(student, objective=NextToken(), references={}))
    placement, specs = made.placement, made.references.specs["teacher"]["parameters"]
    own = sum(placement.bytes_per_device(spec) for spec in flattened(specs).values())
    whole = sum(4 * spec.size for spec in flattened(specs).values())
    assert arguments(made)["frozen models"] == own < whole / 2
    assert arguments(made)["parameters"] == arguments(plain)["parameters"]
    assert arguments(made)["optimizer"] == arguments(plain)["optimizer"]


@pytest.mark.full
def test_a_teacher_that_trained_on_is_refused_at_a_resume(student, copied, do, tmp_path):
    own = replace(student, references={"teacher": replace(student.references["teacher"], source=str(copied))})
    do(own, tmp_path / "run", devices=4, steps=3)
    before = RunFolder.existing(copied).tree()
    do(replace(before, steps=before.steps + 1, run_dir=None), copied)
    with pytest.raises(UserError, match=r"Train\.references\['teacher'\]"):
        do(own, tmp_path / "run", devices=4)


def test_a_missing_teacher_and_another_vocabulary_are_refused_by_name(student, few):
    with few(4):
        with pytest.raises(UserError, match=r"Distillation .*'teacher'.* Train\.references"):
            program(replace(student, references={}))
        reference = student.references["teacher"]
        other = replace(reference, model=replace(reference.model, vocab=reference.model.vocab + 1))
        with pytest.raises(UserError, match=r"Train\.model .*Train\.references\['teacher'\].*vocab_multiple"):
            program(replace(student, references={"teacher": other}))


def test_beta_is_refused_where_it_says_nothing_and_at_the_limits():
    with pytest.raises(UserError, match=r"beta is 0\.1.*'reverse'.*'jensen_shannon'"):
        Distillation(divergence="reverse", beta=0.1)
    with pytest.raises(UserError, match=r"Distillation\.beta"):
        Distillation(divergence="jensen_shannon", beta=1.0)
    with pytest.raises(UserError, match=r"'js'; must be one of 'forward', 'reverse', 'jensen_shannon'"):
        Distillation(divergence="js")


@pytest.mark.full
def test_a_teacher_of_experts_routes_by_the_biases_that_it_was_trained_to(trained, do, few, tmp_path):
    shape = {"vocab": 320, "embed": 32, "layers": 1, "heads": 4, "kv_heads": 4, "mlp": 32}
    experts = Mixtral(**shape, routing=Routing(4, 2, bias_rate=0.1))
    teacher = do(replace(trained.train, model=experts, steps=3, sample=None), tmp_path / "teacher")
    beside = {"teacher": Reference(experts, str(teacher.folder))}
    student = replace(trained.train, objective=Distillation(), references=beside)
    with few(1):
        references = program(student).references
        read_references(student, references, sources_of(student, references, silent), None, silent)
        runtime = references.runtimes["teacher"]
        abstract = runtime.abstract({"variables": nested(runtime.variables)})
        saved = Reader(teacher.folder / "checkpoints").restore_parts(abstract)
    found, exact = (flattened(one) for one in (references.given["teacher"]["variables"], saved["variables"]))
    for path, value in exact.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert np.any(found["layers/block/moe/router/bias"])
