"""A supervisor: what it starts again, what it does not, and when it gives up."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axon.errors import UserError
from axon.launch.start import supervises

SUPERVISOR = """
import json, os, sys
from pathlib import Path
from axon.launch import restarts
restarts.FIRST_WAIT_SECONDS = 0.05
if restarts.is_supervised(os.environ):
    restarts.obey_supervisor(os.environ)
    number = len(Path("starts").read_text()) if Path("starts").exists() else 0
    Path("starts").write_text("x" * (number + 1))
    exec(sys.argv[2])
    sys.exit(0)
def latest():
    return int(Path("saved").read_text()) if Path("saved").exists() else None
def record(kind, step, **values):
    with open("events", "a") as file: file.write(json.dumps({"kind": kind, "step": step, **values}) + "\\n")
sys.exit(restarts.Supervisor(int(sys.argv[1]), latest, record).run())
"""


@pytest.fixture
def begin(tmp_path):
    """begin(restarts, script): a supervisor of a process that runs the script, `number` being how often it ran."""
    begun = []

    def start(restarts: int, script: str) -> subprocess.Popen:
        command = [sys.executable, "-c", "import os, time, sys\nfrom pathlib import Path\n" + SUPERVISOR]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        begun.append(subprocess.Popen([*command, str(restarts), script], cwd=tmp_path, **pipes))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def events(folder: Path):
    return (
        [json.loads(line) for line in (folder / "events").read_text().splitlines()]
        if (folder / "events").exists()
        else []
    )


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def test_deaths_that_leave_a_later_checkpoint_are_followed_by_a_start(begin, tmp_path):
    process = begin(5, "Path('saved').write_text(str(number))\nif number < 3: os.kill(os.getpid(), (9, 6, 11)[number])")
    said = process.communicate(timeout=40)[1]
    assert process.returncode == 0, said
    assert starts(tmp_path) == 4
    assert [(event["kind"], event["step"], event["code"]) for event in events(tmp_path)] == [
        ("restart", 0, -9),
        ("restart", 1, -6),
        ("restart", 2, -11),
    ]
    waits = [event["seconds"] for event in events(tmp_path)]
    assert waits == [0.05, 0.1, 0.2]
    assert "start 1 was killed by SIGKILL" in said
    assert "Restart 1 of 5" in said


def test_it_gives_up_with_a_summary_after_so_many_restarts(begin, tmp_path):
    process = begin(2, "Path('saved').write_text(str(number))\nsys.exit(1)")
    said = process.communicate(timeout=40)[1]
    assert process.returncode == 1
    assert starts(tmp_path) == 3
    assert "gave up after 3 starts: --restarts 2 allows no more starts" in said
    assert "start 3 ended with exit code 1" in said
    assert "The run is at checkpoint 2" in said
    assert events(tmp_path)[-1]["kind"] == "give_up"


def test_it_gives_up_where_two_starts_come_no_further(begin, tmp_path):
    process = begin(50, "Path('saved').write_text('7')\nsys.exit(124)")
    said = process.communicate(timeout=40)[1]
    assert process.returncode == 1
    assert starts(tmp_path) == 3  # the first got to checkpoint 7
    assert "2 starts in a row came no further than the same checkpoint" in said


@pytest.mark.parametrize("code", [2, 130, 143])
def test_a_mistake_and_an_interrupt_are_not_started_again(begin, tmp_path, code):
    process = begin(5, f"sys.exit({code})")
    process.communicate(timeout=40)
    assert process.returncode == code
    assert starts(tmp_path) == 1
    assert not events(tmp_path)


OBEDIENT = """
from axon.launch.signals import Interrupts
with Interrupts() as interrupts:
    Path("ready").write_text(str(os.getpid()))
    while not interrupts.requested: time.sleep(0.01)
    time.sleep(0.3)
    Path("done").touch()
sys.exit(interrupts.exit_code)
"""


@pytest.mark.parametrize("to_all", [False, True], ids=["to the supervisor", "to its process group"])
def test_an_interrupt_reaches_the_process_once_and_ends_both(begin, tmp_path, to_all):
    process = begin(5, OBEDIENT)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    process.communicate(timeout=40)
    assert process.returncode == 130
    assert (tmp_path / "done").exists()
    assert starts(tmp_path) == 1


def test_the_process_does_not_outlive_its_supervisor(begin, tmp_path):
    process = begin(5, OBEDIENT)
    while not (tmp_path / "ready").exists() or not (tmp_path / "ready").read_text():
        time.sleep(0.02)
    pid = int((tmp_path / "ready").read_text())
    process.kill()
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_only_the_command_that_a_person_started_supervises(monkeypatch):
    assert supervises(3)
    assert not supervises(0)
    monkeypatch.setenv("AXON_SUPERVISOR", "1")
    assert not supervises(3)
    monkeypatch.delenv("AXON_SUPERVISOR")
    monkeypatch.setenv("AXON_PROCESS", "1")
    monkeypatch.setenv("AXON_PROCESSES", "2")
    with pytest.raises(UserError, match=r"--restarts 3: this is process 1 of 2"):
        supervises(3)
    monkeypatch.setenv("AXON_LAUNCHER", "1")
    assert not supervises(3)
