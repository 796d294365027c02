"""`axon train --processes 2`, whole: against one process, through deaths and interrupts, and with mistakes."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from member import tell_pipeline, tell_split, tell_training
from poison import HELD, release

from axon.checkpoint import Reader
from axon.observe.lines import read_lines
from axon.observe.metrics import read_metrics

TINY = (
    (Path(__file__).parents[1] / "tiny.gin").read_text()
    + """
Train.steps = 60
Cosine.steps = 60
Train.evaluation = @Evaluation()
Evaluation.every = 50
Evaluation.batches = 3
Checkpoints.every = 7

Train.layout = @Layout()
Layout.mesh = {'data': 2, 'tensor': 2}
Layout.zero = 3
"""
)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """The working directory of every run of this file, with tiny.gin, and the same whose end waits for its release."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "tiny.gin").write_text(TINY)
    (folder / "held.gin").write_text(TINY + HELD.format(50))
    return folder


@pytest.fixture(scope="module")
def start(here, environment):
    """start(processes, run, …) begins `axon train` on four devices in all; it is gone when the module is."""
    begun = []

    def begin(
        processes: int, run: str, *arguments: str, each: int | None = None, config: str = "tiny.gin"
    ) -> subprocess.Popen:
        own = ["train", config, "--run-dir", run, "--processes", str(processes), *arguments]
        command = [sys.executable, "-c", "from axon.cli import main; main()", *own]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        begun.append(subprocess.Popen(command, cwd=here, env=environment(each or 4 // processes), **pipes))
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def whole(start, here) -> Path:
    """The folder of a run of two processes that nobody disturbed."""
    done = start(2, "whole")
    out = done.communicate(timeout=200)[0]
    assert done.returncode == 0, out
    return here / "whole"


def numbers(folder: Path, *names: str) -> list[list[float]]:
    return [[row[n] for n in ("step", *names)] for row in read_metrics(folder / "metrics.jsonl") if names[0] in row]


def wait_for_step(step: int, folder: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 200
    while not ((folder / "metrics.jsonl").exists() and len(numbers(folder, "loss")) >= step):
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


def wait_for_checkpoint(folder: Path, process: subprocess.Popen) -> None:
    """A save goes on in the background: a step that was recorded after it says nothing of it."""
    until = time.monotonic() + 200
    while not ((folder / "checkpoints").exists() and Reader(folder / "checkpoints").steps()):
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


def children(process: subprocess.Popen) -> list[int]:
    """The pids of the processes that it started, in order."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_steps_of_two_processes_have_the_numbers_of_one(told):
    assert told[0]["training"] == told[1]["training"]
    np.testing.assert_allclose(told[0]["training"], tell_training(0), rtol=1e-5)


@pytest.mark.full
def test_a_pipeline_of_two_processes_with_a_stage_each_has_the_numbers_of_one(tell):
    told = tell("pipeline")
    assert [process["pipeline"]["stages"] for process in told] == [[0], [1]]
    assert told[0]["pipeline"]["numbers"] == told[1]["pipeline"]["numbers"]
    np.testing.assert_allclose(told[0]["pipeline"]["numbers"], tell_pipeline(0)["numbers"], rtol=1e-5)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_split_schedule_of_four_processes_has_the_numbers_of_one(tell):
    """Both stages have devices of two processes, which sum over `tensor` where a stage may be idle."""
    told = [process["split"] for process in tell("split", processes=4)]
    assert told == [told[0]] * 4
    np.testing.assert_allclose(told[0], tell_split(0), rtol=1e-5)


@pytest.mark.slow
def test_a_run_of_two_processes_has_the_numbers_of_one(start, here):
    runs = {count: start(count, f"by {count}", "--steps", "10") for count in (1, 2)}
    for done in runs.values():
        out = done.communicate(timeout=200)[0]
        assert done.returncode == 0, out
    assert '"processes": 2' in (here / "by 2/run.json").read_text()
    one, two = (numbers(here / f"by {count}", "loss", "grad_norm", "tokens") for count in runs)
    np.testing.assert_allclose(one, two, rtol=1e-5)
    one, two = (numbers(here / f"by {count}", "eval_loss", "eval_bits_per_byte") for count in runs)
    np.testing.assert_allclose(one, two, rtol=1e-5)


@pytest.mark.full
def test_what_is_written_once_is_whole(whole):
    assert [step for step, _ in numbers(whole, "loss")] == list(range(1, 61))
    assert [step for step, _ in numbers(whole, "eval_loss")] == [50, 60]
    assert Reader(whole / "checkpoints").steps() == [56, 60]
    assert {"config.gin", "run.json", "loss.png", "tokenizer.json"} <= {path.name for path in whole.iterdir()}


@pytest.mark.full
def test_a_killed_process_ends_the_run_and_the_same_command_resumes_bit_for_bit(start, here, whole):
    process = start(2, "cut", config="held.gin")
    wait_for_step(random.randint(8, 50), here / "cut", process)
    wait_for_checkpoint(here / "cut", process)
    index = random.randrange(2)
    victim = children(process)[index]
    os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()
    out = process.communicate(timeout=30)[0]
    assert time.monotonic() - begun < 30
    assert process.returncode == 1
    assert re.search(rf"axon: process {index} \(pid {victim}\) was killed by SIGKILL.*the same command resumes", out)
    assert "Traceback" not in out
    release(here / "cut")
    again = start(2, "cut", config="held.gin")
    out = again.communicate(timeout=200)[0]
    assert again.returncode == 0, out
    assert re.search(r"resumed from step \d+", out)
    assert numbers(here / "cut", "loss", "grad_norm") == numbers(whole, "loss", "grad_norm")
    assert numbers(here / "cut", "eval_loss", "eval_bits_per_byte") == numbers(whole, "eval_loss", "eval_bits_per_byte")


def staged(schedule: str) -> list[str]:
    """Options of a run of two stages with four layers in all, by a schedule."""
    layout = ("Llama.layers=4", "Layout.mesh={'pipe': 2, 'tensor': 2}", "Layout.zero=0", "Layout.microbatches=4")
    return [word for one in (*layout, *schedule.split()) for word in ("--set", one)]


@pytest.mark.full
def test_a_killed_pipeline_resumes_under_another_schedule(start, here):
    """Bit for bit up to the checkpoint, and for ten steps from there within rounding."""
    plain, split = (
        staged(f"Layout.schedule=@{schedule}") for schedule in ("OneFOneB()", "Interleaved() Interleaved.split=True")
    )
    whole, cut = start(1, "piped", *plain), start(1, "piped cut", *plain, config="held.gin")
    wait_for_step(9, here / "piped cut", cut)
    wait_for_checkpoint(here / "piped cut", cut)
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    release(here / "piped cut")
    latest = Reader(here / "piped cut" / "checkpoints").latest()
    again = start(1, "piped cut", "--steps", str(latest + 10), *split, config="held.gin")
    for process in (again, whole):
        out = process.communicate(timeout=400)[0]
        assert process.returncode == 0, out
    found, expected = (numbers(here / name, "loss", "grad_norm") for name in ("piped cut", "piped"))
    assert len(found) == latest + 10
    assert found[:latest] == expected[:latest]
    np.testing.assert_allclose(found, expected[: latest + 10], rtol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_and_evaluates_alike(start, here, whole):
    for processes, steps in ((1, 9), (2, 23), (1, 31), (4, 60)):
        process = start(processes, "changing", "--steps", str(steps))
        out = process.communicate(timeout=300)[0]
        assert process.returncode == 0, out
    changed = here / "changing"
    np.testing.assert_allclose(numbers(changed, "loss"), numbers(whole, "loss"), rtol=1e-4)
    evaluations = [numbers(folder, "eval_loss", "eval_bits_per_byte") for folder in (changed, whole)]
    assert [step for step, *_ in evaluations[0]] == [9, 23, 31, 50, 60]  # at each stop, too
    np.testing.assert_allclose(evaluations[0][-2:], evaluations[1], rtol=1e-4)
    np.testing.assert_allclose(numbers(changed, "loss")[:10], numbers(whole, "loss")[:10], rtol=1e-5)


@pytest.mark.full
def test_with_fewer_processes_and_devices_and_with_more_again_the_losses_are_the_same_and_the_change_is_logged(
    start, here, whole
):
    half = ("--set", "Layout.mesh={'data': 2}")
    for processes, steps, changes in ((2, 4, ()), (1, 7, half), (2, 10, ())):
        process = start(processes, "elastic", "--steps", str(steps), *changes, each=2)
        out = process.communicate(timeout=300)[0]
        assert process.returncode == 0, out
    names = ("loss", "grad_norm", "tokens")
    np.testing.assert_allclose(numbers(here / "elastic", *names), numbers(whole, *names)[:10], rtol=1e-5)
    resumed = [event for event in read_lines(here / "elastic/events.jsonl") if event["kind"] == "resume"]
    assert [event["step"] for event in resumed] == [4, 7]
    four, two = {"data": 2, "tensor": 2}, {"data": 2}
    assert resumed[0]["changed"] == {"devices": [4, 2], "mesh": [four, two], "processes": [2, 1]}
    assert resumed[1]["changed"] == {"devices": [2, 4], "mesh": [two, four], "processes": [1, 2]}
    assert "changed since the last start: devices 2 → 4" in out


@pytest.mark.slow
def test_an_interrupt_saves_on_all_processes_at_one_step_and_the_run_goes_on(start, here, whole):
    process = start(2, "interrupted", config="held.gin")
    wait_for_step(random.randint(8, 50), here / "interrupted", process)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    release(here / "interrupted")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130, out
    saved = re.search(r"saved step (\d+) in ", out)
    assert saved, out
    assert out.count("interrupted by SIGINT") == 1
    assert Reader(here / "interrupted/checkpoints").latest() == int(saved[1])
    again = start(2, "interrupted", config="held.gin")
    out = again.communicate(timeout=200)[0]
    assert f"resumed from step {saved[1]}" in out
    assert numbers(here / "interrupted", "loss") == numbers(whole, "loss")


@pytest.mark.full
def test_processes_that_do_not_make_the_mesh_are_one_clear_mistake(start, here):
    process = start(3, "mismatch", each=1)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 2
    message = r"axon: Layout.mesh asks for data 2 × tensor 2, and 3 processes of 1 device each make 3\. .*\n"
    assert re.fullmatch(message, re.sub(r"(\[Gloo\]|\[process \d\] ).*\n", "", out)), out  # without JAX's own lines
    assert not (here / "mismatch").exists()
