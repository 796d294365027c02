"""Files that cannot be read or written: which one, why, and what helps."""

import errno
import os
from pathlib import Path

import pytest

from axon.disk import atomic_folder, named, readable, reading, writing
from axon.errors import UserError


def refused(number: int, path=None) -> OSError:
    """What the system raises; tests may run as root, whom it refuses little."""
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize("wrong", ["", "a\0b", "~no_such_person/text"])
def test_what_is_no_path_is_refused_by_what_it_was_written_for(wrong):
    with pytest.raises(UserError, match=r"Folder\.path is '"):
        named(wrong, "Folder.path")


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", Path("s3://bucket/run")])
def test_a_url_is_refused_where_a_path_is_meant(url):
    with pytest.raises(UserError, match=r"--run-dir is '(s3|gs):.*expected a path.*Checkpoints.mirror"):
        named(url, "--run-dir")


def test_a_path_is_made_absolute_and_its_home_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert named("~/text", "Folder.path") == named("text", "Folder.path") == tmp_path / "text"


def test_a_missing_file_is_named_with_its_neighbour(tmp_path):
    (tmp_path / "corpus.jsonl").touch()
    missing = tmp_path / "corpis.jsonl"
    with pytest.raises(UserError, match=rf"There is no file or folder {missing}\. Did you mean"), reading(missing):
        missing.read_bytes()


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EACCES, "Permission denied"), (errno.EIO, "Input/output error"), (errno.ELOOP, "Too")]
)
def test_a_file_that_the_system_refuses_is_named_with_the_reason(number, said):
    with pytest.raises(UserError, match=rf"^a\.txt cannot be read: {said}"), reading("a.txt"):
        raise refused(number)
    with pytest.raises(UserError, match=rf"^in/b\.txt cannot be read: {said}"), reading("in"):
        raise refused(number, "in/b.txt")


def test_a_name_that_is_too_long_is_an_error_that_says_so(tmp_path):
    long = tmp_path / ("x" * 300)
    with pytest.raises(UserError, match="cannot be read: File name too long"), reading(long):
        long.read_bytes()


def test_text_that_is_not_utf8_is_an_error_that_says_where(tmp_path):
    file = tmp_path / "latin.json"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=rf"{file} cannot be read: it is not UTF-8 .*0xe9 at 3"), reading(file):
        file.read_text(encoding="utf-8")


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "Free some space"), (errno.ENOTDIR, "Another folder")])
def test_a_full_disk_is_told_apart_from_a_wrong_path(number, advice):
    said = f"^cannot write run/lock: {os.strerror(number)}. {advice}"
    with pytest.raises(UserError, match=said), writing("run/lock", "Another folder"):
        raise refused(number)


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a link to one"])
def test_what_is_made_whole_has_its_name_when_it_is_done_and_after_an_error_there_is_nothing(tmp_path, there):
    out = tmp_path / "out"
    if there == "an empty folder":
        out.mkdir()
    elif there == "a link to one":
        (tmp_path / "empty").mkdir()
        out.symlink_to(tmp_path / "empty")
    before = sorted(tmp_path.rglob("*"))

    def fail(part: Path) -> None:
        (part / "half").write_text("half")
        raise refused(errno.ENOSPC)

    with (
        pytest.raises(UserError, match=r"No space left on device\. Free some space"),
        atomic_folder(out, "OUT") as part,
    ):
        fail(part)
    assert sorted(tmp_path.rglob("*")) == before
    with atomic_folder(out, "OUT") as part:
        (part / "all").write_text("all")
        assert not (out / "all").exists()
    assert (out / "all").read_text() == "all"
    assert not list(tmp_path.glob("*.part"))


def test_what_is_there_is_not_replaced_even_if_it_came_meanwhile(tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for taken in (tmp_path / "gone", Path(__file__), tmp_path):
        with pytest.raises(UserError, match=r"OUT: .* is there already; give another"), atomic_folder(taken, "OUT"):
            pass

    def fill(path: Path) -> None:
        path.mkdir()
        (path / "theirs").write_text("dear")

    with pytest.raises(UserError, match="is there already"), atomic_folder(tmp_path / "out", "OUT") as part:
        fill(tmp_path / "out")
    assert not part.exists()
    assert (tmp_path / "out/theirs").read_text() == "dear"


def test_a_link_that_leads_nowhere_is_named_where_a_folder_is_to_be_made(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"run: it is a link to .*unmounted, which is not there"), writing(tmp_path):
        (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: it is a file, not a folder"), writing(tmp_path):
        (tmp_path / "file").mkdir(exist_ok=True)


def test_sizes_are_said_in_units_in_which_they_are_not_nothing():
    assert [readable(size) for size in (12, 4_100, 5_250_000, 10**12)] == ["12 B", "4.1 kB", "5.25 MB", "1 TB"]
