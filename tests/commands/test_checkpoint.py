"""`axon checkpoint`: what each command says and does, as a person runs it."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from axon.checkpoint import CheckpointError, Checkpoints, Reader, Store, open_store
from axon.commands.checkpoint import app
from axon.errors import UserError


def state(step: int) -> dict[str, Any]:
    values = jnp.asarray(np.random.default_rng(0).random((16, 64)), jnp.float32)
    return {"parameters": {"up": values.at[3, 4].add(step), "norm": jnp.ones(4, jnp.bfloat16)}, "step": np.int32(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run")
    with Store(run / "checkpoints", Checkpoints(keep=3)) as store:
        for step in (4, 8, 12):
            store.save(step, state(step), {"tokens": 100 * step, "config": "a long text"})
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run")


def said(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def spoil(run: Path, step: int) -> None:
    path = max((run / "checkpoints" / str(step)).rglob("d/*"), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:50] + bytes([content[50] ^ 16]) + content[51:])


def test_list_has_a_line_for_each_folder_and_how_it_is(run):
    (run / "checkpoints/2.damaged").mkdir()
    (run / "checkpoints/8/checksums.json").write_text("")
    (run / "checkpoints/12/state/manifest.ocdbt").unlink()
    lines = said("list", run).splitlines()
    assert [line.split()[0] for line in lines] == ["4", "8", "12", "2.damaged"]
    assert lines[0].endswith("complete")
    assert "kB" in lines[0]
    assert lines[1].endswith("damaged: checksums.json: its own checksum differs")
    assert lines[2].endswith("damaged: state/manifest.ocdbt: it is missing")
    assert lines[3].endswith("damaged, set aside")


def test_show_has_every_array_and_what_else_was_saved(run):
    lines = said("show", run / "checkpoints/8").splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["parameters/norm", "4", "bfloat16", "8", "B"],
        ["parameters/up", "16", "×", "64", "float32", "4.1", "kB"],
        ["step", "scalar", "int32", "4", "B"],
    ]
    assert lines[3:] == ["step 8: 3 arrays, 4.11 kB before compression", "tokens: 800"]
    assert "step 12: 3 arrays" in said("show", run)


def test_diff_names_the_arrays_that_differ_and_by_how_much(run):
    lines = said("diff", run / "checkpoints/4", run).splitlines()
    assert lines[0].startswith("parameters/up: values, at most 8, relative 0.")
    assert lines[1] == "step: values, at most 8, relative 0.667"
    assert lines[2] == "step 4 and step 12: 2 arrays differ"
    assert said("diff", run, run).splitlines() == ["step 12 and step 12: no arrays differ"]


def test_diff_of_other_arrays_says_how_they_differ(run, tmp_path):
    with Store(tmp_path / "other", Checkpoints()) as store:
        store.save(1, {"parameters": {"up": jnp.ones(3), "norm": jnp.ones(4)}, "more": jnp.ones(1)}, {})
    assert said("diff", run, tmp_path / "other").splitlines() == [
        "more: only in the second",
        "parameters/norm: dtype bfloat16 and float32, at most 0, relative 0",
        "parameters/up: shape (16, 64) and (3,)",
        "step: only in the first",
        "step 12 and step 1: 4 arrays differ",
    ]


def test_verify_exits_with_2_and_names_what_is_damaged(run):
    assert said("verify", run).count("3 arrays, every byte as it was saved") == 3
    spoil(run, 8)
    lines = said("verify", run, code=2).splitlines()
    assert lines[1].startswith("step 8: damaged: parameters/up in state/ocdbt.process_0/d/")
    assert said("verify", run / "checkpoints/12") == "step 12: 3 arrays, every byte as it was saved\n"
    said("verify", run / "checkpoints/8", code=2)


def test_prune_deletes_only_when_told_to_and_says_what_first(run):
    checkpoints = run / "checkpoints"
    assert said("prune", run, "--keep", 1).splitlines() == [
        f"would delete {checkpoints / '4'}",
        f"would delete {checkpoints / '8'}",
        "2 checkpoints to delete; add --yes",
    ]
    assert said("prune", run, "--steps", "8", "--yes") == f"deleting {checkpoints / '8'}\n1 checkpoint deleted\n"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["12", "4"]


def test_prune_says_that_there_is_nothing_to_delete(run):
    assert said("prune", run, "--keep", 3, "--yes") == "no checkpoints deleted\n"


def test_prune_keeps_as_many_intact_ones_and_says_which_are_damaged(run):
    spoil(run, 12)
    assert f"{run}/checkpoints/12 is left, and not counted: it is damaged: " in said("prune", run, "--keep", 1, "--yes")
    assert Reader(run / "checkpoints").steps() == [8, 12]
    with pytest.raises(UserError, match="would delete every intact checkpoint"):
        said("prune", run, "--steps", 8, "--yes")
    said("prune", run, "--steps", 12, "--yes")
    assert Reader(run / "checkpoints").steps() == [8]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--steps", "9"], r"no checkpoint of step 9 .* there are \[4, 8, 12\]"),
        (["--steps", "4,8,12", "--yes"], "would delete every intact checkpoint"),
        (["--steps", "all"], "--steps is 'all'; expected numbers and commas"),
        (["--steps", "9" * 20], "expected numbers and commas"),
        (["--steps", "9" * 5000], "expected numbers and commas"),
        (["--steps", "٣"], "expected numbers and commas"),
        (["--yes"], "nothing to delete: give --keep N"),
    ],
)
def test_prune_refuses_what_is_not_there_and_to_delete_all(run, options, why):
    with pytest.raises(UserError, match=why):
        said("prune", run, *options)
    assert len(list((run / "checkpoints").iterdir())) == 3


def test_prune_of_a_local_folder_is_refused_while_its_run_saves_into_it(tmp_path):
    settings = Checkpoints(every=9, local_folder=str(tmp_path), local_every=1, local_keep=2)
    with open_store(tmp_path / "run", settings, "local", "a") as store:
        for step in (1, 2):
            store.save(step, state(step), {}, durable=False)
        store.wait()
        with pytest.raises(UserError, match=r"local is locked by a run that saves into it: wait for it"):
            said("prune", tmp_path / "local", "--keep", 1, "--yes")
    assert said("prune", tmp_path / "local", "--keep", 1, "--yes").endswith("\n1 checkpoint deleted\n")


def test_prune_deletes_no_other_runs_checkpoint_and_none_with_a_file_of_someone(run, tmp_path):
    for name in ("a", "b"):
        with Store(tmp_path / name / "checkpoints", Checkpoints(keep=9), run=name) as store:
            for step in (1, 2, 3) if name == "a" else (4,):
                store.save(step, state(step), {})
        (tmp_path / name / "id").write_text(name)
    (tmp_path / "b/checkpoints/4").rename(tmp_path / "a/checkpoints/4")
    with pytest.raises(UserError, match=r"checkpoints/4 is not deleted: it is another run's"):
        said("prune", tmp_path / "a", "--steps", "4", "--yes")
    (tmp_path / "a/checkpoints/1/notes.txt").write_text("the good one")
    with pytest.raises(UserError, match=r"notes\.txt in it is no part of a checkpoint. Nothing was deleted"):
        said("prune", tmp_path / "a", "--keep", "1", "--yes")
    assert Reader(tmp_path / "a/checkpoints").steps() == [1, 2, 3, 4]


def test_folders_with_numbers_for_names_are_no_checkpoints(run, tmp_path):
    for year in ("2019", "2020", "9" * 20, "9" * 200):
        (tmp_path / "photos" / year).mkdir(parents=True)
        (tmp_path / "photos" / year / "_CHECKPOINT_METADATA").write_text("{}")
        shutil.copytree(tmp_path / "photos" / year, run / "checkpoints" / year)
    for command in (["show"], ["list"], ["verify"], ["prune", "--keep", "1", "--yes"]):
        for folder in (tmp_path / "photos", tmp_path / "photos/2019", "/proc"):
            with pytest.raises(CheckpointError, match=f"no checkpoint in {folder}; expected the folder of a run"):
                said(command[0], folder, *command[1:])
    assert sum("no checkpoint of Axon's" in line for line in said("list", run).splitlines()) == 4
    assert "checkpoints/2019" not in said("prune", run, "--keep", "1", "--yes")
    assert len(list((run / "checkpoints").iterdir())) == 5


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}; expected the folder of a run"):
        said("list", tmp_path)
