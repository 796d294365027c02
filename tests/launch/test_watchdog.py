"""The watchdog: a phase that takes too long ends the process with its stacks written, and nothing else does."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import re, sys, threading, time
from pathlib import Path
from axon.launch import watchdog
watchdog.TICK_SECONDS = 0.05
limits = {"step": 0.3, "save": 60.0}
def notice(hang):
    Path("noticed").write_text(f"{hang.phase} {hang.step}")
def in_the_middle_of_things():
    time.sleep(60)
with watchdog.Watchdog(limits.get, Path("stacks.txt"), notice) as dog:
"""


@pytest.fixture
def ran(tmp_path):
    """ran(body): exit code, seconds taken and standard error of a process that does this under a watchdog."""

    def run(body: str):
        script = HEAD + "".join(f"    {line}\n" for line in body.splitlines())
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=50)
        return done.returncode, time.monotonic() - began, done.stderr

    return run


def test_a_hung_step_ends_the_process_with_its_stacks_phase_and_step_written(ran, tmp_path: Path):
    code, seconds, said = ran("dog.enter('step', 7)\nin_the_middle_of_things()")
    assert code == 124
    assert seconds < 40
    assert re.search(r"nothing has happened for \d+ s in phase 'step' at step 7: stopping", said)
    assert "in_the_middle_of_things" in (tmp_path / "stacks.txt").read_text()
    assert (tmp_path / "noticed").read_text() == "step 7"


def test_steps_that_go_on_and_phases_with_time_left_end_nothing(ran, tmp_path: Path):
    """By a clock that stands still but where it is put on, until the watchdog has looked at it again."""
    body = """
from types import SimpleNamespace
now, looks = [0.0], []
def look():
    looks.append(now[0])
    return looks[-1]
watchdog.time = SimpleNamespace(monotonic=look, sleep=time.sleep)
def pass_by(seconds):
    now[0] += seconds
    seen = len(looks)
    while len(looks) < seen + 2: time.sleep(0.01)
for step in range(10):
    dog.enter('step', step); pass_by(0.14)
with dog.during('save', 9): pass_by(50)
pass_by(0.14)
dog.enter('anything without a limit'); pass_by(1000)
"""
    assert ran(body)[0] == 0
    assert not (tmp_path / "stacks.txt").exists()


def test_a_call_that_never_lets_other_threads_run_is_ended_too(ran):
    body = """
watchdog.BACKUP_SECONDS = 0.5
limits['step'] = 1.0
arm, armed = watchdog._set_backup, threading.Event()
watchdog._set_backup = lambda seconds: arm(seconds) or seconds and armed.set()
dog.enter('step', 7)
armed.wait()
re.match('(a+)+$', 'a' * 40 + 'b')
"""
    code, _, said = ran(body)
    assert code == 1
    assert "Timeout" in said
    assert 'File "<string>"' in said


def test_a_disk_that_does_not_answer_does_not_keep_the_process(ran):
    body = "watchdog.NOTICE_SECONDS = 0.2\ndog._notice = lambda hang: time.sleep(60)\ndog.enter('step')\ntime.sleep(60)"
    assert ran(body)[0] == 124
