"""Objects in processes of their own, and how these end."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from axon.launch.worker import Worker, WorkerError


class Counter:
    """Counts up from `start`; and does what one must not."""

    def __init__(self, start, file=None):
        self.count = start
        if file is not None:
            subprocess.Popen(["sleep", "60"])
            Path(file).write_text(str(os.getpid()))

    def add(self, number):
        self.count += number
        return self.count

    def fail(self, how):
        if how == "exit":
            sys.exit(3)
        if how == "die":
            os._exit(3)
        if how == "sleep":
            time.sleep(60)
        raise KeyError(how)

    def lock(self):
        import threading

        return threading.Lock()


def group_runs(pid):
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ends(pid):
    """Whether a group of processes ends within some seconds."""
    until = time.monotonic() + 20
    while group_runs(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not group_runs(pid)


def test_calls_return_or_raise_what_the_object_does_until_one_dies_or_hangs(rng, tmp_path):
    start, *numbers = map(int, rng.integers(1000, size=4))
    worker = Worker(partial(Counter, start, tmp_path / "pid"))
    for number in numbers:
        start += number
        assert worker.call("add", number, limit=20) == start
    for args, error, said in (
        (("fail", "other"), KeyError, "other"),
        (("fail", "exit"), RuntimeError, r"SystemExit\(3\)"),
        (("lock",), TypeError, "lock"),
    ):
        with pytest.raises(error, match=said):
            worker.call(*args, limit=20)
    assert worker.call("add", 1, limit=20) == start + 1
    with pytest.raises(TimeoutError, match=r"not done after 0\.1 seconds"):
        worker.call("fail", "sleep", limit=0.1)
    assert not worker.alive
    assert ends(worker.pid)  # with what it had started
    worker = Worker(partial(Counter, 0))
    with pytest.raises(WorkerError, match="ended with exit code 3"):
        worker.call("fail", "die", limit=20)
    with pytest.raises(KeyError, match="none"):
        Worker(partial(Counter(0).fail, "none")).call("add", 1, limit=20)


def test_a_worker_ends_in_the_middle_of_a_call_with_the_process_that_asks(tmp_path):
    file = tmp_path / "pid"
    code = (
        "import test_worker as t; from functools import partial\n"
        f"t.Worker(partial(t.Counter, 0, {str(file)!r})).call('fail', 'sleep', limit=60)"
    )
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    process = subprocess.Popen([sys.executable, "-c", code], env=here)
    until = time.monotonic() + 30
    while not file.exists() or not file.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ends(int(file.read_text()))
