"""`axon checkpoint`: what each command says and does, as a person runs it."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from axon.checkpoint import CheckpointError, Checkpoints, Store
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
    assert lines[3:] == ["step 8: 3 arrays, 4.1 kB before compression", "tokens: 800"]
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


def test_prune_deletes_only_when_told_to(run):
    checkpoints = run / "checkpoints"
    assert said("prune", run, "--keep", 1) == f"would delete {checkpoints / '4'}\nwould delete {checkpoints / '8'}\n"
    assert said("prune", run, "--steps", "8", "--yes") == f"deleted {checkpoints / '8'}\n"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["12", "4"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--steps", "9"], r"no checkpoint of step 9 .* there are \[4, 8, 12\]"),
        (["--steps", "4,8,12", "--yes"], "would delete every checkpoint"),
        (["--steps", "all"], "--steps is 'all'; expected numbers and commas"),
    ],
)
def test_prune_refuses_what_is_not_there_and_to_delete_all(run, options, why):
    with pytest.raises(UserError, match=why):
        said("prune", run, *options)
    assert len(list((run / "checkpoints").iterdir())) == 3


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}; expected the folder of a run"):
        said("list", tmp_path)
