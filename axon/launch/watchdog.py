"""A watchdog: a process that has been in one phase of its work for too long writes its threads' stacks and ends."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

HUNG = 124
"""The exit code of a process that hung; `timeout` has the same."""

TICK_SECONDS = 1.0
NOTICE_SECONDS = 10.0
"""How long writing stacks and event may take: the disk may be what hangs."""

BACKUP_SECONDS = 60.0
"""After so much more than the limit the C library's timer ends a process whose Python threads cannot run at all."""


class Hang(NamedTuple):
    """What hung: the phase, the step, for how many seconds; and the file with the stacks."""

    phase: str
    step: int | None
    seconds: float
    stacks: Path


class Watchdog:
    """Within this context, ends the process with `HUNG` if it stays in one phase for longer than its limit.

    Args:
        limit: seconds a phase may take, by its name; None for no limit.
        stacks: the file for the stacks of all threads.
        notice: called with the `Hang` before the end, in a thread of its own.
        linger: seconds to wait before the end, so that other processes, which wait for this one, write theirs.

    A phase without progress is what counts: each `enter` starts the time anew. Time in which the process was stopped
    (Ctrl-Z) counts too.
    """

    def __init__(
        self,
        limit: Callable[[str], float | None],
        stacks: Path,
        notice: Callable[[Hang], None],
        linger: float = 0.0,
    ):
        self._limit, self._stacks, self._notice, self._linger = limit, stacks, notice, linger
        self._now: tuple[str, int | None, float] = ("", None, time.monotonic())
        self._done = threading.Event()

    def enter(self, phase: str, step: int | None = None) -> None:
        """What the process does from now on. Takes a microsecond."""
        self._now = phase, step, time.monotonic()

    @contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """The body is this phase; then the one before begins again."""
        before, at, _ = self._now
        self.enter(phase, step)
        try:
            yield
        finally:
            self.enter(before, at)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._done.wait(TICK_SECONDS):
            phase, step, since = self._now
            limit, seconds = self._limit(phase), time.monotonic() - since
            if limit is not None and seconds > limit:
                self._end(Hang(phase, step, seconds, self._stacks))
            _set_backup(None if limit is None else limit - seconds + BACKUP_SECONDS)

    def _end(self, hang: Hang) -> None:
        notice = threading.Thread(target=self._write, args=(hang,), name="hang", daemon=True)
        notice.start()
        notice.join(NOTICE_SECONDS)
        time.sleep(self._linger)
        os._exit(HUNG)

    def _write(self, hang: Hang) -> None:
        at = "" if hang.step is None else f" at step {hang.step}"
        said = f"nothing has happened for {hang.seconds:.0f} s in phase {hang.phase!r}{at}"
        # Straight to the descriptor: the main thread may be holding the lock of Python's own buffers.
        os.write(2, f"\naxon: {said}: stopping. The stacks of all threads are in {hang.stacks}\n".encode())
        try:
            with hang.stacks.open("w") as file:
                file.write(f"{said}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        finally:
            self._notice(hang)


def _set_backup(seconds: float | None) -> None:
    """A timer that needs no interpreter, which a call that never releases its lock would stop too."""
    if seconds is None or sys.__stderr__ is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
