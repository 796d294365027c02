"""A root holds a thing whole or not at all, whoever else writes and whenever a process dies."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from axon.data.store import Root
from axon.disk import cache_folder
from axon.errors import UserError

LOCATIONS = ["memory://bucket/a", "folder", "file"]


@pytest.fixture(params=LOCATIONS)
def root(request, tmp_path):
    folder = tmp_path / "with space"
    return Root({"folder": str(folder), "file": f"file://{folder}"}.get(request.param, request.param))


@pytest.fixture
def said():
    return []


def test_the_cache_is_where_the_environment_says(cache, monkeypatch):
    assert cache_folder() == cache == Root(None).local
    monkeypatch.delenv("AXON_CACHE")
    assert str(cache_folder()).endswith(".cache/axon")


def test_a_thing_is_made_once(root, said):
    makes = []

    def make(part):
        makes.append(part)
        return f"the thing in {part}"

    first = root.once("things/one/manifest.json", make, said.append)
    assert root.once("things/one/manifest.json", make, said.append) == first == f"the thing in {makes[0]}"
    assert len(makes) == 1
    assert root.read("things/two/manifest.json") is None
    assert not said


def test_the_first_of_two_writers_counts(root, said):
    def make(part):
        root.array(f"{part}/a", spec={"metadata": {"shape": [3], "data_type": "uint16"}}, create=True)[...] = 1
        root.write_once("things/one/manifest.json", "another was first")
        return part

    assert root.once("things/one/manifest.json", make, said.append) == "another was first"
    left = [key for key in root._keys.list().result() if b"part-" in key]
    assert left == []


def test_what_fails_leaves_nothing(root, said):
    def make(part):
        root.array(f"{part}/a", spec={"metadata": {"shape": [3], "data_type": "uint16"}}, create=True)[...] = 1
        raise RuntimeError

    with pytest.raises(RuntimeError):
        root.once("things/one/manifest.json", make, said.append)
    assert not [key for key in root._keys.list().result() if not key.endswith(b"lock")]


PREPARE = """
import sys, time
from pathlib import Path
from axon.data.store import Root

def make(part):
    array = root.array(f"{part}/a", spec={"metadata": {"shape": [3], "data_type": "uint16"}}, create=True)
    array[...] = 1
    print("writing", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    return part

root = Root(sys.argv[1])
print(root.once("things/one/manifest.json", make, print), flush=True)
"""


def preparing(folder, end: Path) -> subprocess.Popen:
    """A process that prepares until there is a file `end`."""
    command = [sys.executable, "-c", PREPARE, str(folder), str(end)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=os.getcwd())


def test_a_killed_preparation_leaves_nothing_half_written(tmp_path, said):
    with preparing(tmp_path, tmp_path / "never") as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "writing\n"
        killed.send_signal(signal.SIGKILL)
    (left,) = (tmp_path / "things/one").glob("part-*")
    root = Root(str(tmp_path))
    assert root.read("things/one/manifest.json") is None
    made = root.once("things/one/manifest.json", lambda part: part, said.append)
    assert not left.exists()
    assert made != str(left.relative_to(tmp_path))


def test_what_only_is_called_as_a_part_of_this_machine_stays(tmp_path, said, monkeypatch):
    folder = tmp_path / "things/one"
    ours, hexadecimal = f"part-{socket.gethostname()}", 8 * "0"
    for name in (f"{ours}-{hexadecimal}", f"{ours}-2-{hexadecimal}", f"{ours}-photos", f"{ours}-{8 * '1'}"):
        (folder / name / "a/c").mkdir(parents=True)
        (folder / name / "a/c/0").touch()
    (folder / f"{ours}-{8 * '1'}/dear.jpg").touch()
    (folder / f"{ours}-{8 * '2'}").symlink_to(folder / f"{ours}-photos")
    before = sorted(folder.rglob("*"))
    Root(str(tmp_path)).once("things/one/manifest.json", lambda part: "made", said.append)
    gone = {*before} - {*folder.rglob("*")}
    assert {path.relative_to(folder).parts[0] for path in gone} == {f"{ours}-{hexadecimal}"}


def test_without_locks_the_part_of_another_process_stays(tmp_path, said, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    part = tmp_path / f"things/one/part-{socket.gethostname()}-{8 * '0'}/a/c"
    part.mkdir(parents=True)
    Root(str(tmp_path)).once("things/one/manifest.json", lambda part: "made", said.append)
    assert part.exists()


def test_a_second_process_waits_for_the_first_and_takes_its_work(tmp_path):
    end, said = tmp_path / "end", []

    def wait(line):
        said.append(line)
        end.touch()

    with preparing(tmp_path, end) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "writing\n"
        found = Root(str(tmp_path)).once("things/one/manifest.json", lambda part: "made twice", wait)
        assert found == first.stdout.readline().strip()
    (line,) = said
    assert "waiting for another process" in line


def test_a_location_that_cannot_be_used_says_what_to_set():
    for location in ("x3://bucket/a", "s3://", "/proc/nowhere/at/all", ""):
        with pytest.raises(UserError, match=r"Data\.store"):
            Root(location).once("things/one/manifest.json", lambda part: part, print)


def test_a_full_disk_is_said_for_the_lock_too(tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    root = Root(str(tmp_path))
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UserError, match=r"No space left on device: .*things/one/lock"):
        root.once("things/one/manifest.json", lambda part: part, print)


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert Root(str(tmp_path)).once("things/one/manifest.json", lambda part: "made", print) == "made"
