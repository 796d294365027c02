"""What is checked before a run begins: that its checkpoints are where they were, and its folders apart."""

import json
import shutil
from dataclasses import replace

import pytest

from axon.checkpoint import Checkpoints
from axon.errors import UserError
from axon.run import Evaluation
from axon.run.before import check_not_lost, check_separate_folders
from axon.run.folder import RunFolder

OWN = ("{}/run", "file://{}/run", "{}/run/../run", "run", "{}/link", "{}/link/below", "{}/run/copy", "{}", "..", "/")


@pytest.mark.parametrize("location", OWN)
def test_a_mirror_that_is_the_runs_own_folder_or_around_or_in_it_is_refused(tiny, tmp_path, location, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    train = replace(tiny, checkpoints=Checkpoints(mirror=location.format(tmp_path)))
    for folder in (tmp_path / "run", "run", tmp_path / "link"):
        with pytest.raises(UserError, match=r"Checkpoints\.mirror is .*neither may be in the other"):
            check_separate_folders(train, RunFolder(folder))
    check_separate_folders(
        replace(train, checkpoints=Checkpoints(mirror=f"{tmp_path}/run2")), RunFolder(tmp_path / "run")
    )


@pytest.mark.parametrize(
    "local", ["run/checkpoints", "run/checkpoints/fast", "link/checkpoints", "mirror", "mirror/fast"]
)
def test_a_local_folder_among_the_durable_checkpoints_is_refused(tiny, tmp_path, local):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    settings = Checkpoints(local_folder=f"{tmp_path}/{local}", local_every=2, mirror=str(tmp_path / "mirror"))
    with pytest.raises(UserError, match=r"Checkpoints\.local_folder is .*which has the durable checkpoints"):
        check_separate_folders(replace(tiny, checkpoints=settings), RunFolder(tmp_path / "run"))
    check_separate_folders(
        replace(tiny, checkpoints=replace(settings, local_folder=f"{tmp_path}/a")), RunFolder(tmp_path / "run")
    )


def test_a_run_whose_checkpoints_are_gone_ends_and_nothing_is_cut_back(trained, do, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    for _ in range(2):
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "lock"}
        with pytest.raises(UserError, match=r"up to step 12, and there is none in .*checkpoints\. Is a"):
            do(trained.train, folder)
        assert {name: (folder / name).read_bytes() for name in before} == before
        (folder / "checkpoints").mkdir(exist_ok=True)


@pytest.mark.parametrize("begun", [True, False])
def test_another_runs_checkpoint_among_a_runs_own_is_not_resumed_from(tiny, trained, do, tmp_path, begun):
    own = do(tiny, tmp_path / "run", steps=1).folder if begun else tmp_path / "run"
    shutil.copytree(trained.folder / "checkpoints/12", own / "checkpoints/12")
    names = rf"checkpoints/12 is of another run, {RunFolder(trained.folder).identifier()}, .*{trained.folder}.*"
    with pytest.raises(UserError, match=rf"{names}{own}.*InitFrom\.optimizer"):
        do(tiny, own, steps=2)
    shutil.rmtree(own / "checkpoints/12")
    do(tiny, own, steps=2)


def test_a_run_that_saved_nothing_yet_begins_again_and_says_so(trained, do, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    left = [one for one in events if one["kind"] in ("start", "compile_begin")]
    (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in left))
    ran = do(trained.train, folder, steps=2)
    assert "no checkpoint yet; 12 steps are done again" in ran.lines


def test_local_checkpoints_may_be_gone_with_their_machine(tiny, tmp_path):
    folder = RunFolder(tmp_path)
    begun, ended = {"kind": "save_begin", "step": 2, "local": True}, {"kind": "save_end", "step": 2}
    folder.events.write_text(json.dumps(begun) + "\n" + json.dumps(ended) + "\n")
    check_not_lost(tiny, folder)
    folder.events.write_text(json.dumps(begun | {"local": False}) + "\n" + json.dumps(ended) + "\n")
    with pytest.raises(UserError, match="up to step 2, and there"):
        check_not_lost(tiny, folder)


def test_the_best_are_not_kept_where_no_checkpoint_is_evaluated(tiny):
    best = replace(tiny, steps=12, checkpoints=Checkpoints(every=5, keep_best=1), evaluation=Evaluation(every=10))
    with pytest.raises(UserError, match=r"Checkpoints\.keep_best is 1, and Train\.evaluation is None"):
        replace(best, evaluation=None)
    with pytest.raises(UserError, match=r"no step .* is both saved and evaluated.*Set Evaluation\.every to 5"):
        replace(best, evaluation=Evaluation(every=3))
