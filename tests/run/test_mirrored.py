"""A run that goes on where its folder is empty or older than the copy of its checkpoints."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from axon import object_store
from axon.checkpoint import Checkpoints, Reader, Store
from axon.errors import UserError
from axon.observe.lines import read_lines
from axon.run.folder import RunFolder
from axon.run.mirrored import fetched
from tests.checkpoint.s3_server import serving
from tests.checkpoint.test_mirror import ABSTRACT, Run, state

URL = "s3://bucket/runs/first"


@pytest.fixture
def server(monkeypatch):
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setattr(object_store, "ATTEMPTS", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "1ms"})
        yield server


@pytest.fixture
def mirrored(tiny):
    return replace(tiny, checkpoints=Checkpoints(every=5, mirror=URL))


@pytest.fixture
def begun(server, mirrored, tmp_path):
    """A run's folder with a checkpoint of steps 3 and 5, which are copied."""
    folder = RunFolder(tmp_path / "run")
    folder.write(mirrored, {})
    with Run(folder.path) as run:
        run.save(3, 5)
    return folder


def ignore(line: str) -> None:
    pass


def first(folder: RunFolder) -> float:
    return float(Reader(folder.checkpoints).restore(ABSTRACT)[0]["w"][0])


def test_where_the_folder_is_empty_or_older_the_newest_is_fetched(begun, mirrored, tmp_path):
    said: list[str] = []
    fetched(mirrored, begun, said.append)
    assert said == []
    new = RunFolder(tmp_path / "new")
    fetched(mirrored, new, said.append)
    assert said == [f"fetching checkpoint 5 from {URL}"]
    assert first(new) == 5
    assert new.identifier() == begun.identifier()
    assert new.metrics.read_text() == "of step 5\n"
    shutil.rmtree(begun.checkpoints / "5")
    fetched(mirrored, begun, said.append)
    assert first(begun) == 5
    assert not (new.path / "fetching").exists()


def test_where_the_folder_is_newer_nothing_is_fetched(begun, mirrored):
    with Store(begun.checkpoints, Checkpoints()) as store:
        store.save(8, state(8), {})
    fetched(mirrored, begun, pytest.fail)
    assert first(begun) == 8


def test_remains_of_a_killed_fetch_are_deleted(begun, mirrored, tmp_path):
    new = RunFolder(tmp_path / "new")
    (new.path / "fetching/checkpoints/5/state/d").mkdir(parents=True)
    left = f"checkpoints/5/state/d/{32 * '0'}"
    (new.path / "fetching" / left).touch()
    fetched(mirrored, new, ignore)
    assert first(new) == 5
    assert not (new.path / left).exists()


def test_a_folder_of_someone_that_is_called_as_ours_for_what_is_fetched_stays(begun, mirrored, tmp_path):
    (tmp_path / "new/fetching").mkdir(parents=True)
    (tmp_path / "new/fetching/stones.txt").write_text("dear")
    with pytest.raises(UserError, match=r"fetching/stones.txt is not Axon's, so .*fetching is not deleted"):
        fetched(mirrored, RunFolder(tmp_path / "new"), ignore)
    assert (tmp_path / "new/fetching/stones.txt").read_text() == "dear"


def seen(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.fixture
def copied(begun, tmp_path):
    """The copy of a run, of the steps 3 and 5, in a folder."""
    with Run(tmp_path / "run", location=str(tmp_path / "mirror")) as run:
        run.mirror.saved(5)
    assert run.there() == [3, 5]
    return tmp_path / "mirror"


HARMS = ("a run", "no owner", "no markers", "another id", "no config", "pictures", "a link", "a linked file", "nothing")


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_no_copy_of_this_run_is_refused_and_stays_as_it_is(begun, mirrored, copied, tmp_path, harm):
    if harm == "a run":
        shutil.rmtree(copied)
        shutil.copytree(begun.path, copied)
    elif harm == "no owner":
        (copied / "owner").unlink()
    elif harm == "no markers":
        (copied / "owner").unlink()
        shutil.rmtree(copied / "complete")
    elif harm == "another id":
        (copied / "id").write_text("another")
        (copied / "metrics.jsonl").unlink()
    elif harm == "no config":
        (copied / "config.gin").unlink()
    elif harm == "pictures":
        (copied / "checkpoints/2019").mkdir()
        (copied / "checkpoints/2019/a.jpg").write_text("dear")
    elif "link" in harm:
        (tmp_path / "dear/8").mkdir(parents=True)
        (tmp_path / "dear/8/a.jpg").write_text("dear")
        (copied / "checkpoints/8").symlink_to(tmp_path / ("dear/8" if harm == "a link" else "dear/8/a.jpg"))
    before = seen(tmp_path)
    train = replace(mirrored, checkpoints=Checkpoints(every=5, mirror=str(copied)))
    if harm == "nothing":
        fetched(train, begun, ignore)
    else:
        with pytest.raises(
            UserError, match=r"Checkpoints\.mirror is .*(whose they are|another run|no copy that a run)"
        ):
            fetched(train, begun, ignore)
        assert seen(tmp_path) == before


@pytest.mark.parametrize("where", ["new", "run"])
def test_if_every_one_is_damaged_the_run_does_not_begin_anew_and_goes_on_from_its_own(
    begun, mirrored, server, where, tmp_path
):
    for key in [key for key in server.objects if key.endswith("_CHECKPOINT_METADATA")]:
        server.objects[key] = b"?" * len(server.objects[key])
    shutil.rmtree(begun.checkpoints / "5")
    if where == "new":
        with pytest.raises(UserError, match=f"every checkpoint in {URL} is damaged"):
            fetched(mirrored, RunFolder(tmp_path / "new"), ignore)
        assert not (tmp_path / "new/config.gin").exists()
    else:
        said: list[str] = []
        fetched(mirrored, begun, said.append)
        assert "checkpoint 5 in" in said[1]
        assert first(begun) == 3


def test_another_run_is_refused_and_not_taken_over(begun, mirrored, server, tmp_path):
    def owner():
        return server.objects["/bucket/runs/first/owner"]

    before = owner()
    with pytest.raises(UserError, match=rf"{URL} has another run.*\n  .*\n?.*seed[^\0]*another Checkpoints.mirror"):
        fetched(replace(mirrored, seed=1), RunFolder(tmp_path / "new"), ignore)
    again = RunFolder(tmp_path / "again")
    again.write(mirrored, {})
    again.metrics.write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(UserError, match=r"which has another run than .*again, of the same configuration"):
        fetched(mirrored, again, ignore)
    assert owner() == before
    fetched(mirrored, begun, ignore)
    assert owner() != before


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_mirror_that_cannot_be_written_is_refused_at_once(server, mirrored, tmp_path, status):
    server.refuse = lambda method, key: status if method == "PUT" else None
    said = rf"cannot write {URL}/owner: .*{status}[^\0]*AWS_ACCESS_KEY_ID[^\0]*AWS_ENDPOINT_URL.*Checkpoints.mirror"
    with pytest.raises(UserError, match=said):
        fetched(mirrored, RunFolder(tmp_path / "run"), ignore)


def test_a_folder_that_cannot_be_written_is_refused_too(mirrored, tmp_path):
    (tmp_path / "file").touch()
    mirror = str(tmp_path / "file/below")
    with pytest.raises(UserError, match=rf"cannot (list|write) {mirror}/.*: .*[^\0]*or change Checkpoints.mirror"):
        fetched(replace(mirrored, checkpoints=Checkpoints(mirror=mirror)), RunFolder(tmp_path / "run"), ignore)


@pytest.mark.full
@pytest.mark.parametrize("field", ["Checkpoints.mirror", "Train.run_dir"])
def test_a_run_whose_machine_is_gone_goes_on_elsewhere_bit_for_bit(
    server, mirrored, tiny, trained, do, tmp_path, field, monkeypatch
):
    monkeypatch.setenv("AXON_CACHE", str(tmp_path / "cache"))
    train, run_dir = (mirrored, tmp_path / "run") if field == "Checkpoints.mirror" else (tiny, URL)
    do(train, run_dir, steps=7)
    folder = replace(train, run_dir=str(run_dir)).folder
    shutil.rmtree(folder)
    ran = do(train, run_dir)
    assert f"fetching checkpoint 7 from {URL}" in ran.lines
    assert "resumed from step 7" in ran.lines
    files = (folder / "metrics.jsonl", trained.folder / "metrics.jsonl")
    losses, whole = ([one["loss"] for one in read_lines(file) if "loss" in one] for file in files)
    assert losses == whole
    kinds = [event["kind"] for event in read_lines(folder / "events.jsonl")]
    assert kinds.count("fetched") == 1
    assert kinds.count("mirrored") >= 2
    assert kinds.count("start") == 2
    elsewhere = RunFolder.existing(URL)
    assert elsewhere.reader(train.checkpoints).latest() == 12
    assert read_lines(elsewhere.metrics) == read_lines(folder / "metrics.jsonl")


def test_the_two_ways_to_name_a_mirror_are_one_too_many(tiny):
    with pytest.raises(UserError, match="set one of the two"):
        replace(tiny, run_dir=URL, checkpoints=Checkpoints(mirror=URL))
