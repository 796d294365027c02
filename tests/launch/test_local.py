"""Starting processes on this machine and watching them: what the whole ends with, however one of them does."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from axon.errors import UserError
from axon.launch import local
from axon.launch.local import HOST, launch

LAUNCHER = """
import sys
from axon.launch.local import launch
from axon.launch.signals import Interrupted
sys.orig_argv = [sys.executable, "-c", sys.argv[2]]
try:
    sys.exit(launch(int(sys.argv[1])))
except Interrupted as stop:
    print("all ended by", stop)
    sys.exit(stop.exit_code)
"""

HEAD = """
import os, signal, sys, time
from pathlib import Path
index = int(os.environ["AXON_PROCESS"])
Path(f"pid{index}").write_text(str(os.getpid()))
def wait_for_end(other):
    while not (pid := Path(f"pid{other}").exists() and Path(f"pid{other}").read_text()): time.sleep(0.01)
    try:
        while "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(): time.sleep(0.01)
    except OSError: pass  # its parent has seen it
"""

OBEDIENT = """
from axon.launch.cluster import die_with_parent
from axon.launch.signals import Interrupts
die_with_parent(int(os.environ["AXON_LAUNCHER"]))
with Interrupts() as interrupts:
    Path(f"ready{index}").write_text(str(os.getpid()))
    while not interrupts.requested:
        time.sleep(0.01)
    Path(f"told{index}").touch()
    time.sleep(0.3)  # as if saving: what is passed on, and what came from the terminal, are here by now
    Path(f"saved{index}").touch()
os._exit(interrupts.exit_code)
"""


@pytest.fixture
def children(monkeypatch, tmp_path):
    """children(script): what each process that is launched from here on runs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda script: monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", HEAD + script])


@pytest.fixture
def launcher(tmp_path):
    """launcher(count, script): a launcher in a session of its own, once all its processes are ready."""
    started = []

    def begin(count: int, script: str) -> subprocess.Popen:
        command = [sys.executable, "-c", LAUNCHER, str(count), HEAD + script]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes)
        started.append(process)
        wait_for(lambda: sum(bool(ready.read_text()) for ready in tmp_path.glob("ready*")) == count)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(what, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_each_process_runs_the_same_command_as_another_member(children, tmp_path):
    children('Path(str(index)).write_text(os.environ["AXON_PROCESSES"] + os.environ["AXON_COORDINATOR"])')
    assert launch(3) == 0
    texts = [(tmp_path / str(index)).read_text() for index in range(3)]
    assert len(set(texts)) == 1
    assert re.fullmatch(r"3127\.0\.0\.1:\d+", texts[0])


def test_a_killed_process_is_named_and_the_others_end_within_seconds(children, capfd):
    victim = random.randrange(3)
    children(f"time.sleep(0.3)\nif index == {victim}: os.kill(os.getpid(), 9)\ntime.sleep(60)")
    begun = time.monotonic()
    assert launch(3) == 1
    assert time.monotonic() - begun < 10
    message = rf"axon: process {victim} \(pid \d+\) was killed by SIGKILL\. .* the same command resumes from the last"
    assert re.fullmatch(message + " checkpoint\n", capfd.readouterr().err)


@pytest.mark.few(ending=["os.abort()"])
@pytest.mark.parametrize("ending", ["sys.exit(1)", "os.abort()"])
def test_a_killed_process_is_named_though_others_that_missed_it_are_found_ended_with_it(
    ending, children, capfd, monkeypatch
):
    monkeypatch.setattr(local, "WATCH_SECONDS", 1.5)  # as on a busy machine
    children(f"if index == 1: os.kill(os.getpid(), 9)\nwait_for_end(1)\n{ending}")
    assert launch(2) == 1
    assert re.search(r"axon: process 1 \(pid \d+\) was killed by SIGKILL", capfd.readouterr().err)


def test_what_another_process_says_last_is_shown_with_its_name_and_nobody_elses_complaint(children, capfd):
    children("""
if index == 2:
    sys.exit("first line\\nsecond line")
while os.getppid() and not Path("gone").exists(): time.sleep(0.01)
""")
    assert launch(3) == 1
    said = capfd.readouterr().err
    assert said.startswith("[process 2] first line\n[process 2] second line\naxon: process 2")
    assert "ended with exit code 1; its output is above" in said


def test_a_mistake_ends_all_with_exit_code_2_and_no_more_words(children, capfd):
    children("if index: wait_for_end(0)\nprint('axon: a mistake', file=sys.stderr)\nsys.exit(2)")
    assert launch(2) == 2
    assert capfd.readouterr().err == "axon: a mistake\n"


def test_only_process_0_writes_to_standard_output(children, capfd):
    children("print('I am', index)")
    assert launch(3) == 0
    assert capfd.readouterr().out == "I am 0\n"


def test_a_port_in_use_is_refused_before_anything_starts(children, tmp_path):
    children("Path('started').touch()")
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port} on {HOST} is unavailable: Address already in use"):
            launch(2, port)
    assert not (tmp_path / "started").exists()


def test_a_port_that_is_free_is_where_they_meet(children, tmp_path):
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    children("Path('port').write_text(os.environ['AXON_COORDINATOR'])")
    assert launch(2, port) == 0
    assert (tmp_path / "port").read_text() == f"{HOST}:{port}"


def test_gpus_are_shared_out_evenly_or_refused(children, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    children("Path(str(index)).write_text(os.environ['JAX_LOCAL_DEVICE_IDS'])")
    assert launch(2) == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["0,1", "2,3"]
    with pytest.raises(UserError, match="3 does not divide the 4 GPUs"):
        launch(3)


@pytest.mark.parametrize("to_all", [False, True], ids=["to the launcher", "to its process group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_lets_every_process_save_once(launcher, tmp_path, number, to_all):
    process = launcher(2, OBEDIENT)
    (os.killpg if to_all else os.kill)(process.pid, number)
    out = process.communicate(timeout=20)[0]
    assert out == f"all ended by interrupted by {signal.Signals(number).name}\n"
    assert process.returncode == 128 + number
    assert all((tmp_path / f"saved{index}").exists() for index in range(2))


def test_a_second_interrupt_ends_all_at_once(launcher, tmp_path):
    process = launcher(2, OBEDIENT.replace("time.sleep(0.3)", "time.sleep(60)"))
    pids = [int((tmp_path / f"ready{index}").read_text()) for index in range(2)]
    os.kill(process.pid, signal.SIGINT)
    wait_for(lambda: all((tmp_path / f"told{index}").exists() for index in range(2)))
    time.sleep(0.2)  # later than what would be the first delivered again
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    wait_for(lambda: not any(map(alive, pids)), 10)


def test_processes_do_not_outlive_their_launcher(launcher, tmp_path):
    process = launcher(2, OBEDIENT)
    pids = [int((tmp_path / f"ready{index}").read_text()) for index in range(2)]
    assert all(map(alive, pids))
    process.kill()
    wait_for(lambda: not any(map(alive, pids)), 10)
