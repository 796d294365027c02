"""Processes on this machine that train together: started, watched and ended together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from axon.errors import UserError
from axon.launch.cluster import Process
from axon.launch.signals import Interrupted, Interrupts, forwarded_signal
from axon.launch.worker import how_ended

HOST = "127.0.0.1"
WATCH_SECONDS = 0.05
GRACE_SECONDS = 10.0
"""How long the others may take to end after the first process that was interrupted."""

_MISTAKE = 2
_INTERRUPTED = {128 + signal.SIGINT, 128 + signal.SIGTERM}


def launch(count: int, port: int | None = None) -> int:
    """Run this same command in `count` processes of this machine; the exit code for all of them.

    0: all succeeded. 2: a `UserError`, which a process has reported. 1: a process died or failed; the message names it,
    and the others are killed. Raises `UserError` if `port` is in use, `Interrupted` once an interrupt has ended all.
    """
    coordinator = f"{HOST}:{_port(port)}"
    with Interrupts() as interrupts, _started(count, coordinator) as processes:
        return _watched(processes, interrupts)


@dataclass
class ChildProcess:
    """A process that was started here. `forward` shows the standard error of others than process 0, line by line."""

    index: int
    popen: subprocess.Popen

    def __post_init__(self):
        self._lines: deque[bytes] = deque()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @classmethod
    def start(cls, command: Sequence[str], process: Process, environ: Mapping[str, str]) -> "ChildProcess":
        """Run `command` as `process`; only process 0 has the terminal."""
        first = process.index == 0
        popen = subprocess.Popen(
            command,
            env={**environ, **process.environment()},
            stdin=None if first else subprocess.DEVNULL,
            stdout=None if first else subprocess.DEVNULL,
            stderr=None if first else subprocess.PIPE,
        )
        return cls(process.index, popen)

    @property
    def code(self) -> int | None:
        """The exit code, minus the signal that killed it, or None while it runs."""
        return self.popen.poll()

    def ending(self) -> str:
        """How it ended, for messages."""
        return f"process {self.index} (pid {self.popen.pid}) {how_ended(self.code or 0)}"

    def forward(self) -> None:
        """Show what it has written since the last call; all of it, if it has ended."""
        if self.code is not None:
            self._listener.join(1.0)
        while self._lines:
            os.write(2, f"[process {self.index}] ".encode() + self._lines.popleft())

    def _listen(self) -> None:
        for line in self.popen.stderr or ():
            self._lines.append(line)


@contextmanager
def _started(count: int, coordinator: str) -> Iterator[list[ChildProcess]]:
    """The processes; all of them are killed on leaving."""
    command = [sys.executable, *sys.orig_argv[1:]]
    processes: list[ChildProcess] = []
    try:
        for index, devices in enumerate(_devices(count)):
            process = Process(index, count, coordinator, os.getpid())
            processes.append(ChildProcess.start(command, process, os.environ | devices))
        yield processes
    finally:
        for process in processes:
            process.popen.kill()  # not SIGTERM: saving is a collective, and a peer has ended
            process.popen.wait()


def _watched(processes: Sequence[ChildProcess], interrupts: Interrupts) -> int:
    """Wait until all have succeeded, or one has not; the exit code for all."""
    forwarded = None
    while not all(process.code == 0 for process in processes):
        if interrupts.requested is not None and forwarded is None:
            forwarded = interrupts.requested
            _forward(forwarded, processes)
        if ended := [process for process in processes if process.code]:
            return _ended(min(ended, key=_may_follow), processes, forwarded)
        for process in processes:
            process.forward()
        time.sleep(WATCH_SECONDS)
    return 0


def _may_follow(process: ChildProcess) -> bool:
    """Whether it may have ended because another did: those that miss a peer fail, or abort; nobody is killed by it."""
    return process.code is None or process.code > 0 or process.code == -signal.SIGABRT


def _forward(number: int, processes: Sequence[ChildProcess]) -> None:
    for process in processes:
        process.popen.send_signal(forwarded_signal(number))


def _ended(process: ChildProcess, processes: Sequence[ChildProcess], forwarded: int | None) -> int:
    """The exit code for all, given that `process`, the first to end, did not succeed."""
    code = process.code or 0
    if forwarded is not None and -code in (forwarded, forwarded_signal(forwarded)):
        code = 128 + forwarded  # killed by it before it had a handler
    if code in _INTERRUPTED:
        _wait(processes)
        raise Interrupted(code - 128)
    process.forward()  # and not the others: what they report now is its absence
    if code != _MISTAKE:
        above = "" if code < 0 else "; its output is above"
        print(
            f"axon: {process.ending()}{above}. The others were stopped; the same command resumes from the last "
            "checkpoint",
            file=sys.stderr,
        )
    return _MISTAKE if code == _MISTAKE else 1


def _wait(processes: Sequence[ChildProcess]) -> None:
    until = time.monotonic() + GRACE_SECONDS
    while any(process.code is None for process in processes) and time.monotonic() < until:
        time.sleep(WATCH_SECONDS)


def _port(requested: int | None) -> int:
    """`requested`, or a free one. Raises `UserError` if `requested` is in use."""
    with socket.socket() as probe:
        try:
            probe.bind((HOST, requested or 0))
        except OSError as error:
            raise UserError(
                f"--port {requested} on {HOST} is unavailable: {error.strerror}. Leave --port out to take a free one"
            ) from None
        return probe.getsockname()[1]


def _devices(count: int) -> list[dict[str, str]]:
    """For each process, the variable that gives it its share of this machine's GPUs; none on CPU."""
    gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else _gpus()
    if gpus % count:
        raise UserError(f"--processes {count} does not divide the {gpus} GPUs here; expected a divisor of {gpus}")
    each = gpus // count
    shares = [range(index * each, (index + 1) * each) for index in range(count)]
    return [{"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, share))} if share else {} for share in shares]


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else len(list(Path("/dev").glob("nvidia[0-9]*")))
