"""Whole commands that hang, die, and are told to stop; of one process and of two."""

import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from poison import HELD, release

from axon.checkpoint import Reader
from axon.observe.lines import read_lines
from tests.checkpoint.s3_server import serving

TWO = "\nTrain.layout = @Layout()\nLayout.mesh = {'data': 2}\n"
SHORT = "\nTrain.steps = 60\nCheckpoints.every = 7\n"


def losses(folder: Path):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_lines(folder / "metrics.jsonl") if "loss" in r]


def kinds(folder: Path, *wanted: str):
    return [event for event in read_lines(folder / "events.jsonl") if event["kind"] in wanted]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.full
def test_a_step_that_hangs_ends_the_run_with_its_stacks_and_the_next_start_goes_on(start, tmp_path):
    limits = "\nTrain.faults = @Faults()\nFaults.hang_seconds = 6\n"
    process = start(tmp_path / "run", lines=HELD.format(23) + limits + SHORT)
    out = process.communicate(timeout=200)[0]
    assert process.returncode == 124, out
    assert re.search(r"nothing has happened for \d+ s in phase 'step' at step 23: stopping", out), out
    assert "sleep_while_held" in (tmp_path / "run/stacks-0.txt").read_text()
    (hang,) = kinds(tmp_path / "run", "hang")
    assert (hang["step"], hang["phase"]) == (23, "step")
    again = start(tmp_path / "run", lines=SHORT)
    out = again.communicate(timeout=200)[0]
    assert again.returncode == 0, out
    assert re.search(r"resumed from step (14|21)", out)
    assert [step for step, *_ in losses(tmp_path / "run")] == list(range(1, 61))


@pytest.mark.full
def test_sigterm_to_one_process_of_two_saves_one_step_on_both(start, tmp_path, wait_for_step):
    process = start(tmp_path / "run", "--processes", "2", lines=TWO + SHORT + HELD.format(50))
    wait_for_step(random.randint(8, 50), tmp_path / "run", process)
    os.kill(children(process.pid)[1], signal.SIGTERM)
    release(tmp_path / "run")
    out = process.communicate(timeout=100)[0]
    assert process.returncode == 143, out
    (stop,) = kinds(tmp_path / "run", "stop")
    assert stop["signal"] == signal.SIGTERM
    reader = Reader(tmp_path / "run/checkpoints")
    assert reader.latest() == stop["step"] == losses(tmp_path / "run")[-1][0]
    assert kinds(tmp_path / "run", "end")[0]["outcome"] == "interrupted"


@pytest.mark.slow
def test_two_processes_under_a_supervisor_go_on_when_one_is_killed(start, tmp_path, wait_for_step):
    whole = start(tmp_path / "whole", "--processes", "2", lines=TWO + SHORT)
    assert whole.communicate(timeout=200)[0] is not None
    process = start(tmp_path / "cut", "--processes", "2", "--restarts", "3", lines=TWO + SHORT + HELD.format(50))
    for number in (1, 2):
        wait_for_step(20 * number, tmp_path / "cut", process)
        (launcher,) = children(process.pid)
        os.kill(random.choice(children(launcher)), signal.SIGKILL)
        while len(kinds(tmp_path / "cut", "compile_begin")) == number:  # then the metrics are those of the next start
            time.sleep(0.01)
    release(tmp_path / "cut")
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 0, out
    assert [event["number"] for event in kinds(tmp_path / "cut", "restart")] == [1, 2]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.full
def test_two_processes_that_were_stopped_go_on_from_the_mirror(start, tmp_path, wait_for_step, monkeypatch):
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        lines = TWO + SHORT + "\nCheckpoints.mirror = 's3://bucket/run'\n"
        process = start(tmp_path / "run", "--processes", "2", lines=lines + HELD.format(50))
        wait_for_step(random.randint(8, 50), tmp_path / "run", process)
        server.seconds = 1.0  # the last copy takes longer than processes wait for each other where nothing is copied
        os.killpg(process.pid, signal.SIGTERM)
        release(tmp_path / "run")
        out = process.communicate(timeout=200)[0]
        assert process.returncode == 143, out
        assert "waiting for the copy to s3://bucket/run" in out
        (stop,) = kinds(tmp_path / "run", "stop")
        shutil.rmtree(tmp_path / "run")
        server.seconds = 0
        again = start(tmp_path / "run", "--processes", "2", lines=lines)
        out = again.communicate(timeout=200)[0]
        assert again.returncode == 0, out
        assert f"resumed from step {stop['step']}" in out
        assert [step for step, *_ in losses(tmp_path / "run")] == list(range(1, 61))
        assert any(key.startswith("/bucket/run/complete/60-") for key in server.objects)
