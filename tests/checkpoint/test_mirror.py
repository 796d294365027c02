"""A run's checkpoints in an object store: what is there after failures of all kinds, and what is fetched from there."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import object_store
from axon.checkpoint import Checkpoints, Reader, Store, mirror
from axon.checkpoint.inspect import entries, opened
from axon.checkpoint.keep import steps_to_keep
from axon.checkpoint.mirror import Mirror, owner
from axon.checkpoint.remote import FILES, Remote, fetched_run
from axon.errors import UserError
from axon.signed_json import signed
from tests.checkpoint.s3_server import serving

URL = "s3://bucket/runs/first"
ABSTRACT = {"w": jax.ShapeDtypeStruct((1024,), jnp.float32)}


@pytest.fixture
def server(monkeypatch):
    """A server, which the S3 URLs of this test are at, and attempts that do not take long."""
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setattr(object_store, "ATTEMPTS", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "1ms"})
        yield server


def state(step: int) -> dict[str, jax.Array]:
    """One array, whose first value is the step, that is too large for the index."""
    return {"w": jnp.asarray(np.random.default_rng(step).random(1024), jnp.float32).at[0].set(step)}


class Run:
    """A run in a folder that saves and copies; `said` and `events` are what the copying reported."""

    def __init__(self, folder: Path, checkpoints: Checkpoints | None = None, location: str = URL):
        self.folder, self.checkpoints = folder, checkpoints or Checkpoints(keep=2)
        self.remote = Remote(location, "Checkpoints.mirror")
        self.owner = owner()
        self.said: list[str] = []
        self.events: list[tuple[str, int | None]] = []

    def __enter__(self):
        self.folder.mkdir(exist_ok=True)
        self.remote.claim(self.owner)
        self.store = Store(self.folder / "checkpoints", self.checkpoints)
        self.mirror = Mirror(self.remote, self.owner, self.folder, self.store, self._record, self.said.append)
        self.mirror.__enter__()
        return self

    def __exit__(self, *error):
        self.mirror.__exit__(*error)
        self.store.close()

    def _record(self, kind, step=None, **values):
        self.events.append((kind, step))

    def save(self, *steps: int) -> None:
        for step in steps:
            (self.folder / "metrics.jsonl").write_text(f"of step {step}\n")
            self.store.save(step, state(step), {"tokens": step})
            self.store.wait()
            self.mirror.saved(step)

    def copied(self, *steps: int) -> None:
        """Saves, and waits for each copy."""
        for step in steps:
            self.save(step)
            until(lambda step=step: step in self.there())

    def told(self, begin: str) -> bool:
        """Whether the last line that was reported begins so."""
        self.mirror.look()
        return bool(self.said) and self.said[-1].startswith(begin)

    def there(self) -> list[int]:
        return [copy.step for copy in self.remote.copies()]

    def here(self) -> list[int]:
        return Reader(self.folder / "checkpoints").steps()

    def fetched(self, folder: Path):
        """What is fetched into an empty folder: the step, the lines of damaged ones, and the array."""
        found = self.remote.fetch_newest(self.remote.copies(), folder, [].append)
        assert found is not None
        restored, extra = Reader(folder / "checkpoints").restore(ABSTRACT)
        assert extra == {"tokens": found.copy.step}
        return found.copy.step, found.damaged, np.asarray(restored["w"])


def until(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def data_of(server, step: int, rng) -> str:
    """The key of a random one of the objects of a checkpoint that has any bytes."""
    keys = sorted(k for k in server.objects if k.startswith(f"/bucket/runs/first/checkpoints/{step}/"))
    return str(rng.choice([key for key in keys if server.objects[key] and not key.endswith("checksums.json")]))


@pytest.mark.parametrize("location", [URL, "{}/mirror", "file://{}/mirror"])
def test_an_emptied_folder_is_fetched_bit_for_bit(server, tmp_path, location):
    with Run(tmp_path / "run", location=location.format(tmp_path)) as run:
        run.save(3, 5)
    saved = {path.relative_to(run.folder): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert run.events[-1] == ("mirrored", 5)
    assert not [line for line in run.said if "waiting" not in line]
    elsewhere = tmp_path / "elsewhere"
    step, damaged, array = run.fetched(elsewhere)
    run.remote.fetch_files(elsewhere)
    assert (step, damaged) == (5, ())
    assert array.tobytes() == np.asarray(state(5)["w"]).tobytes()
    fetched = {path.relative_to(elsewhere): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    assert fetched == {name: content for name, content in saved.items() if "checkpoints/3" not in str(name)}
    assert Path("checkpoints/5/checksums.json") in fetched


def test_a_copy_that_was_not_finished_is_not_there_and_the_next_run_does_it_again(server, tmp_path, rng):
    with Run(tmp_path / "run") as run:
        run.copied(3)
        puts, last = 0, int(rng.integers(0, 8))  # so many are taken of the next copy

        def refuse(method, key):
            nonlocal puts
            puts += method == "PUT"
            return 403 if method == "PUT" and puts > last else None

        server.refuse = refuse
        run.save(5)
        until(lambda: puts > last)
    assert run.there() == [3]
    assert run.fetched(tmp_path / "elsewhere")[0] == 3
    assert "checkpoint 5 is not copied: cannot write s3://bucket/runs/first/" in run.said[-1]
    assert ("mirror_failed", 5) in run.events
    server.refuse = lambda method, key: None
    with Run(tmp_path / "run") as run:
        run.mirror.saved(5)
    assert run.there() == [3, 5]


KILLED = """
import sys, time
from pathlib import Path
from tests.checkpoint.test_mirror import Run
with Run(Path(sys.argv[1])) as run:
    run.copied(3)
    print("copied", flush=True)
    sys.stdin.readline()
    run.save(5)
    time.sleep(60)
"""


@pytest.mark.full
def test_killed_in_the_middle_of_a_copy_the_one_before_is_there(server, tmp_path, rng):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "copied\n"
        server.seconds = 1.0
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: any("checkpoints/5/" in key for key in list(server.objects)))
        time.sleep(rng.random() / 4)
        process.kill()
    server.seconds = 0
    run = Run(tmp_path / "run")
    assert run.there() == [3]
    assert run.fetched(tmp_path / "elsewhere")[0] == 3
    assert run.here() == [3, 5]
    with run:
        run.mirror.saved(5)
    assert run.there() == [3, 5]


def flip(content: bytes, rng) -> bytes:
    at = int(rng.integers(len(content)))
    return content[:at] + bytes([content[at] ^ 1 << int(rng.integers(8))]) + content[at + 1 :]


@pytest.mark.parametrize("harm", [flip, lambda content, rng: content[:-1], lambda content, rng: None])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(server, tmp_path, rng, harm):
    with Run(tmp_path / "run") as run:
        run.copied(3, 5)
    key = data_of(server, 5, rng)
    changed = harm(server.objects.pop(key), rng)
    if changed is not None:
        server.objects[key] = changed
    step, (line,), array = run.fetched(tmp_path / "elsewhere")
    assert step == array[0] == 3
    assert line.startswith(f"checkpoint 5 in {URL} is damaged: ")
    assert key.removeprefix("/bucket/runs/first/checkpoints/5/") in line
    with Run(tmp_path / "elsewhere", Checkpoints(keep=1)) as run:
        run.copied(4)
        until(lambda: run.there() == [4, 5])  # later ones than the run has reached again stay, and count for nothing
        run.save(5)
    assert run.there() == [5]
    assert run.fetched(tmp_path / "again")[0] == 5


def test_a_connection_that_breaks_is_no_damage(server, tmp_path):
    with Run(tmp_path / "run") as run:
        run.save(3, 5)
    breaks = iter([True])
    server.cut = lambda key: "/d/" in key and next(breaks, False)
    assert run.fetched(tmp_path / "elsewhere")[:2] == (5, ())
    server.cut = lambda key: "/d/" in key
    with pytest.raises(UserError, match=rf"cannot read {URL}/checkpoints/5/.*partial file"):
        run.fetched(tmp_path / "again")


def test_it_keeps_what_the_folder_keeps_also_when_the_run_goes_on_elsewhere(server, tmp_path):
    keep = Checkpoints(every=2, keep=1, keep_every=4)
    with Run(tmp_path / "run", keep) as run:
        run.copied(2, 4, 6)
    assert run.there() == run.here() == [4, 6]
    assert run.fetched(tmp_path / "elsewhere")[0] == 6
    with Run(tmp_path / "elsewhere", keep) as run:
        run.save(10)
    assert run.here() == [10]
    assert run.there() == [4, 10]
    assert {int(k.split("/")[5]) for k in server.objects if "/checkpoints/" in k} == {4, 10}


def test_a_copy_in_a_folder_reads_as_healthy_when_checkpoints_were_deleted_there(tmp_path):
    with Run(tmp_path / "run", Checkpoints(keep=1), str(tmp_path / "mirror")) as run:
        run.copied(3, 5, 7)
        until(lambda: run.there() == [7])
    assert [path.name for path in (tmp_path / "mirror/checkpoints").iterdir()] == ["7"]
    (tmp_path / "mirror/checkpoints/5").mkdir()  # as such folders were left once
    assert [(one.name, one.condition) for one in entries(opened(str(tmp_path / "mirror"))[0])] == [("7", "complete")]
    next((tmp_path / "mirror/complete").iterdir()).unlink()
    assert entries(opened(str(tmp_path / "mirror"))[0])[0].condition.startswith("not complete: a copy in progress")


def test_what_is_damaged_here_replaces_no_copy(tmp_path):
    with Run(tmp_path / "run", Checkpoints(keep=1), str(tmp_path / "mirror")) as run:
        run.copied(3)
        run.store.save(5, state(5), {})
        run.store.wait()
        data = max((run.folder / "checkpoints/5").rglob("d/*"), key=lambda path: path.stat().st_size)
        data.write_bytes(data.read_bytes()[:-1] + b"?")
        run.mirror.saved(5)
        until(lambda: run.told("checkpoint 5 is not copied: "))
        assert "checkpoints/5 is damaged: " in run.said[-1]
    assert run.there() == [3]
    assert run.fetched(tmp_path / "elsewhere")[0] == 3


def test_a_copy_that_names_files_elsewhere_is_damaged(server, tmp_path):
    with Run(tmp_path / "run") as run:
        run.copied(3)
    key = next(key for key in server.objects if "/complete/" in key)
    server.objects[key] = signed({"files": {"checkpoints/3/../../../dear": 4}}).encode()
    assert run.remote.fetch_newest(run.remote.copies(), tmp_path / "elsewhere", [].append) is None


def test_a_network_that_fails_for_a_while_costs_nothing(server, tmp_path):
    with Run(tmp_path / "run") as run:
        run.copied(3)
        server.refuse = lambda method, key: 503
        run.save(5)
        until(lambda: run.told("checkpoint 5 is not copied: "))
        assert "http_response_code='503'" in run.said[-1]
        assert run.said[-1].endswith("It is tried again after the next save, or at the next start")
        server.refuse = lambda method, key: None
        run.save(7)
    assert run.there() == run.here() == [5, 7]


def test_saving_does_not_wait_and_what_is_being_copied_is_not_deleted(server, tmp_path):
    go_on, begun = threading.Event(), threading.Event()

    def refuse(method, key):
        if method == "PUT" and "checkpoints/3/" in key:
            begun.set()
            assert go_on.wait(60)

    server.refuse = refuse
    with Run(tmp_path / "run", Checkpoints(keep=1)) as run:
        run.save(3)
        assert begun.wait(60)
        run.save(5, 7, 9)
        assert run.here() == [3, 9]
        assert run.there() == []
        go_on.set()
        until(lambda: run.there() == [9])
        run.copied(11)
    assert run.here() == run.there() == [11]


def test_a_run_that_ends_waits_for_the_last_copy_with_a_bound(server, tmp_path, monkeypatch):
    go_on = threading.Event()
    server.refuse = lambda method, key: None if not key.endswith(".json") or go_on.wait(60) else 403
    monkeypatch.setattr(mirror, "FINISH_SECONDS", 0.1)
    with Run(tmp_path / "run") as run:
        run.save(3)
    assert run.said[0].startswith(f"waiting for the copy to {URL}, 0 minutes at most")
    assert run.said[1].startswith(f"the copy to {URL} has not ended")
    go_on.set()
    until(lambda: run.there() == [3])


def test_one_that_was_taken_over_is_left_alone(server, tmp_path):
    with Run(tmp_path / "run") as run:
        run.copied(3)
        other = Run(tmp_path / "other")
        other.remote.claim(other.owner)
        run.save(5)
    assert run.there() == [3]
    assert f"checkpoint 5 is not copied: {URL} was taken over by {other.owner}" in run.said[0]


def test_a_step_that_is_saved_again_replaces_the_one_there(server, tmp_path):
    with Run(tmp_path / "run") as run:
        run.save(3, 5)
    before = run.remote.copies()
    shutil.rmtree(tmp_path / "run/checkpoints/5")
    with Run(tmp_path / "run") as run:
        run.copied(5)
    assert [copy.step for copy in run.remote.copies()] == [3, 5]
    assert run.remote.copies()[0] == before[0]
    assert run.remote.copies()[1].saved > before[1].saved


def test_files_of_the_run_are_copied_when_they_change(server, tmp_path):
    with Run(tmp_path / "run") as run:
        (run.folder / "config.gin").write_text("it")
        run.copied(3, 5)
    written = [key.rpartition("/")[2] for method, key in server.asked if method == "PUT"]
    assert written.count("config.gin") == 1
    assert written.count("metrics.jsonl") == 2
    assert not {*written} & ({*FILES} - {"config.gin", "metrics.jsonl"})


def test_readers_take_the_url_and_fetch_a_checkpoint_once(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AXON_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=f"no complete and intact checkpoint in {URL}"):
        fetched_run(URL, "DIR")
    with Run(tmp_path / "run") as run:
        run.copied(3)
        first = fetched_run(URL, "DIR")
        assert capsys.readouterr().err == f"fetching checkpoint 3 from {URL}\n"
        server.asked.clear()
        assert fetched_run(URL, "DIR") == first
        assert not [key for _, key in server.asked if "/checkpoints/" in key]
        run.copied(5)
    assert opened(URL)[0].steps() == [5]
    found = fetched_run(URL, "DIR")
    assert (found / "metrics.jsonl").read_text() == "of step 5\n"
    assert len([*found.parent.iterdir()]) == 2, "nothing half done is left"


@pytest.mark.parametrize("wrong", ["", "s3://", "ftp://host/x", "s3:///x", "memory://x"])
def test_a_location_that_is_none_is_refused(wrong):
    with pytest.raises(UserError, match=r"Checkpoints\.mirror is"):
        Checkpoints(mirror=wrong)


def test_of_all_policies_the_same_are_kept(rng):
    saved = {int(step): int(step) * 10**9 for step in np.cumsum(rng.integers(1, 5, 20)) * 10}
    steps, losses = sorted(saved), {step: float(rng.random()) for step in saved}
    keep = Checkpoints(every=10, keep=2, keep_every=50, keep_best=2, keep_hours=100 / 3600)
    hours, last = [], -1000
    for step in steps:
        if step - last >= 100:
            hours.append(step)
            last = step
    best = sorted(steps, key=lambda step: losses[step])[:2]
    assert steps_to_keep(keep, losses, saved) == {
        *steps[-2:],
        *best,
        *hours,
        *(step for step in steps if step % 50 == 0),
    }
