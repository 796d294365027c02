"""Starting a command again when it dies: a supervisor above the training process, or above the launcher of several."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from axon.launch.cluster import die_with_parent
from axon.launch.signals import Interrupts, forwarded_signal

SUPERVISOR = "AXON_SUPERVISOR"
"""The environment variable that tells a process the pid of its supervisor."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 300.0
WATCH_SECONDS = 0.05
FUTILE = 2
"""After so many deaths in a row without a later checkpoint another start is no use."""

_MISTAKE = 2
_INTERRUPTED = {128 + signal.SIGINT, 128 + signal.SIGTERM}

Record = Callable[..., None]
"""`Events.record`, which has to open and close the file: between two starts nobody else writes it."""


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Whether a supervisor started this process, or the launcher of this process."""
    return SUPERVISOR in environ


def obey_supervisor(environ: MutableMapping[str, str]) -> None:
    """End when the supervisor does, and leave Ctrl-C to it: it forwards it."""
    die_with_parent(int(environ.pop(SUPERVISOR)))


@dataclass
class Supervisor:
    """Runs this same command until it succeeds, at most `restarts` times more than once.

    A person's mistake (exit code 2) and an interrupt (130, 143) end it, as do too many deaths, or `FUTILE` in a row
    between which no later checkpoint was saved.

    Args:
        latest: the step of the latest checkpoint, or None. record: records an event.
    """

    restarts: int
    latest: Callable[[], int | None]
    record: Record
    _deaths: list[str] = field(default_factory=list)

    def run(self) -> int:
        """The exit code of the whole: that of the last start, or 1 after giving up."""
        with Interrupts() as interrupts:
            futile, step = 0, self.latest()
            while True:
                began = time.monotonic()
                code = _ended(self._start(), interrupts)
                if code in (0, _MISTAKE, *_INTERRUPTED):
                    return code
                reached = self.latest()
                futile = futile + 1 if reached == step else 0
                step = reached
                self._deaths.append(_death(code, step, time.monotonic() - began))
                if why := self._enough(futile):
                    return self._give_up(why, code, step)
                self._wait(code, step, interrupts)
                if interrupts.requested:
                    return interrupts.exit_code

    def _start(self) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env={**os.environ, SUPERVISOR: str(os.getpid())})

    def _enough(self, futile: int) -> str | None:
        if len(self._deaths) > self.restarts:
            return f"--restarts {self.restarts} allows no more starts"
        if futile >= FUTILE:
            return f"{futile} starts in a row came no further than the same checkpoint"
        return None

    def _give_up(self, why: str, code: int, step: int | None) -> int:
        self._record("give_up", step, code=code, restarts=len(self._deaths) - 1, why=why)
        _say(f"gave up after {len(self._deaths)} starts: {why}.")
        for number, death in enumerate(self._deaths, 1):
            _say(f"  start {number} {death}")
        _say(f"The run is at {_at(step)}; the same command continues from there")
        return 1

    def _wait(self, code: int, step: int | None, interrupts: Interrupts) -> None:
        number = len(self._deaths)
        seconds = min(FIRST_WAIT_SECONDS * 2 ** (number - 1), LONGEST_WAIT_SECONDS)
        self._record("restart", step, code=code, number=number, seconds=seconds)
        _say(f"start {number} {self._deaths[-1]}. Restart {number} of {self.restarts} in {seconds:g} s")
        until = time.monotonic() + seconds
        while time.monotonic() < until and not interrupts.requested:
            time.sleep(WATCH_SECONDS)

    def _record(self, kind: str, step: int | None, **values: Any) -> None:
        try:
            self.record(kind, step, **values)
        except Exception as error:  # a full disk must not keep a run from going on once it has space again
            _say(str(error))


def _ended(process: subprocess.Popen, interrupts: Interrupts) -> int:
    """A process's exit code, minus the signal that killed it; 128 plus the signal if an interrupt ended it."""
    forwarded = None
    try:
        while (code := process.poll()) is None:
            if interrupts.requested is not None and forwarded is None:
                forwarded = interrupts.requested
                process.send_signal(forwarded_signal(forwarded))
            time.sleep(WATCH_SECONDS)
    finally:
        process.kill()
        process.wait()
    if forwarded is not None and code:
        return 128 + forwarded
    return 128 - code if -code in (signal.SIGINT, signal.SIGTERM) else code  # before it had a handler


def _death(code: int, step: int | None, seconds: float) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{how} after {seconds:.0f} s, at {_at(step)}"


def _at(step: int | None) -> str:
    return "no checkpoint" if step is None else f"checkpoint {step}"


def _say(line: str) -> None:
    print(f"axon: {line}", file=sys.stderr, flush=True)
