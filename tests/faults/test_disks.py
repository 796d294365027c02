"""Disks that fill up, turn read-only, or have remains of earlier deaths; a clock that is moved back."""

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from axon.checkpoint import CheckpointError, Checkpoints, Reader, Store
from axon.errors import UserError
from axon.run.convert import convert
from axon.run.export import export_model

MEGABYTE = 2**20


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path):
        self.path, self.filler = path, path / "filler"

    def fill(self, left: int) -> None:
        """Leave so many bytes free."""
        self.filler.unlink(missing_ok=True)
        state = os.statvfs(self.path)
        with self.filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize - left))

    def free(self) -> None:
        self.filler.unlink()

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path):
    """A file system of 24 MB, where this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield Disk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def folder(whole, disk) -> Path:
    """The whole run's folder on the small disk, as it was after step 10."""
    folder = Path(shutil.copytree(whole.folder, disk.path / "run"))
    shutil.rmtree(folder / "checkpoints/12")
    return folder


@pytest.mark.full
@pytest.mark.parametrize("left", [64 * 1024, 0], ids=["a checkpoint", "a line"])
def test_a_disk_that_fills_up_ends_the_run_and_freed_it_goes_on_bit_for_bit(short, whole, do, disk, folder, left):
    disk.fill(left)
    with pytest.raises(UserError, match=r"cannot write|could not be written|cannot store"):
        do(short, folder)
    disk.free()
    assert Reader(folder / "checkpoints").latest() == 10
    ran = do(short, folder)
    assert "resumed from step 10" in ran.lines
    assert ran.records("loss", "grad_norm") == whole.records("loss", "grad_norm")


def test_a_disk_that_fills_up_while_tokens_are_written_leaves_nothing_half_done(short, disk, monkeypatch):
    data = replace(short.data, store=str(disk.path))
    disk.fill(16 * 1024)
    with pytest.raises(UserError, match=r"is unavailable|cannot write"):
        data.prepare(str)
    disk.free()
    here, there = data.prepare(str), short.data.prepare(str)
    assert here.identity()["digests"] == there.identity()["digests"]
    parts = [path for path in disk.path.glob("tokens/*/part-*") if path.is_dir()]
    assert len(parts) == 1


@pytest.mark.full
def test_a_folder_that_turned_read_only_is_said_and_changes_nothing(short, whole, do, disk, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    disk.remount("ro")
    with pytest.raises(UserError, match=r"cannot write .*Read-only file system"):
        do(short, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    disk.remount("rw")
    assert do(short, folder).records("loss") == whole.records("loss")


@pytest.mark.full
def test_a_save_that_fails_names_the_last_complete_one(short, do, disk):
    folder = disk.path / "run"
    train = replace(short, checkpoints=Checkpoints(every=5, asynchronous=False))
    do(train, folder, steps=5)
    disk.fill(40 * 1024)
    with pytest.raises(
        CheckpointError, match=r"checkpoint 10 could not be written.*No space left(.|\n)*of step 5\. Free some"
    ):
        do(train, folder)


def test_what_is_full_is_said_of_a_save_and_another_fault_is_not_called_a_full_disk(disk):
    with Store(disk.path / "checkpoints", Checkpoints()) as store:
        store.save(1, {"w": jnp.ones(100)}, {})
        store.wait()
        disk.fill(64 * 1024)
        store.save(2, {"w": jnp.ones(100_000)}, {})
        full = r"checkpoint 2 could not .*No space left(.|\n)*step 1\. Free some space"
        with pytest.raises(CheckpointError, match=full):
            store.wait()
    disk.free()
    with Store(disk.path / "checkpoints", Checkpoints()) as store:
        assert store.latest() == 1
        with pytest.raises(UserError, match="w: cannot save an array of uint4"):
            store.save(2, {"w": jnp.zeros(8, "uint4")}, {})
        store.save(2, {"w": jnp.ones(100_000)}, {})
    assert [path.name for path in (disk.path / "checkpoints").iterdir()] == ["2", "1"]


@pytest.mark.full
def test_what_does_not_fit_leaves_nothing_under_its_name_and_freed_it_is_made(whole, disk, tmp_path):
    def made(name: str) -> None:
        source = str(whole.folder)
        if name == "run":
            convert(f"hf:{tmp_path / 'model'}", str(disk.path / name), str)
        elif name == "model":
            convert(source, f"hf:{disk.path / name}", str)
        else:
            export_model(source, disk.path / name, ["cpu"], 1, 8, str)

    convert(str(whole.folder), f"hf:{tmp_path / 'model'}", str)
    for name in ("model", "run", "out"):
        disk.fill(16 * 1024)
        with pytest.raises(UserError, match=r"No space left on device(.|\n)*Free some space and run the same command"):
            made(name)
        assert [path.name for path in disk.path.iterdir()] == ["filler"]
        disk.free()
        made(name)
        shutil.rmtree(disk.path / name)


@pytest.mark.full
def test_remains_of_a_killed_save_are_swept_away_and_not_restored(short, whole, do, copied):
    remains = copied / "checkpoints" / "15.orbax-checkpoint-tmp"
    (remains / "state").mkdir(parents=True)
    (remains / "state/manifest.ocdbt").write_bytes(b"half of it")
    for name in ("metrics.jsonl.new", "config.gin.new", "run.json.new"):
        (copied / name).write_text("half of i")
    assert Reader(copied / "checkpoints").latest() == 12
    ran = do(replace(short, steps=13), copied)
    assert "resumed from step 12" in ran.lines
    assert not remains.exists()
    assert ran.records("loss")[:12] == whole.records("loss")


@pytest.mark.full
def test_a_clock_that_was_moved_back_changes_nothing_but_the_times(short, whole, do, tmp_path, monkeypatch):
    do(short, tmp_path, steps=6)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 86400)
    ran = do(short, tmp_path)
    assert "resumed from step 6" in ran.lines
    assert ran.records("loss") == whole.records("loss")
    assert Reader(tmp_path / "checkpoints").steps() == [10, 12]
    first, second = ran.events("start")
    assert second["time"] < first["time"]
