"""Ctrl-C and SIGTERM: the first requests that the run saves and stops, a second ends it at once."""

import contextvars
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn, Self, TypeVar

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout` signals its child and then the child's process group: one request, delivered twice within microseconds.
DUPLICATE_SIGNAL_WINDOW = 0.1


def forwarded_signal(number: int) -> int:
    """The signal by which a launcher forwards `number` to its processes, which may have received `number` itself."""
    return signal.SIGRTMIN + number


_FORWARDED = {forwarded_signal(number): number for number in _SIGNALS}
_WATCHED = (*_SIGNALS, *_FORWARDED)


class Interrupted(Exception):
    """A person, or the machine's scheduler, interrupted the program. `exit_code` is 130 or 143."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.signal = number
        self.exit_code = 128 + number


def exit_at_once(code: int) -> NoReturn:
    """End the process at once, standard output and error flushed.

    For use while a thread is still compiling: an ordinary exit would destroy the compiler under it, and crash.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Interrupts:
    """Within this context the first SIGINT or SIGTERM sets `requested`; a second one ends the process with 130 or 143.

    A thread of its own reads the signals from the wake-up pipe, so that the second one works even while the main
    thread waits inside a long C++ call, where Python's own handlers do not run. Outside of the main thread, where
    Python allows no handlers, the context does nothing.
    """

    def __init__(self):
        self.requested: int | None = None
        self._first_at = 0.0
        self._seen: Counter[tuple[str, bool]] = Counter()
        self._leaving = threading.Lock()

    @property
    def exit_code(self) -> int:
        """The process's exit code: 0, or 128 plus the signal that was received."""
        return 128 + self.requested if self.requested else 0

    def check(self) -> None:
        """Raises `Interrupted` if a stop was requested."""
        if self.requested:
            raise Interrupted(self.requested)

    def __enter__(self) -> Self:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._handle) for n in _WATCHED}
            self._listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set by C, not Python
        self._write_end.close()  # the listener reads the end, and ends
        self._listener.join()

    def _listen(self) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._listener = threading.Thread(target=self._read_signals, name="signals", daemon=True)
        self._listener.start()

    def _read_signals(self) -> None:
        with self._read_end:
            while number := self._read_end.recv(1):
                if number[0] in _WATCHED:
                    self._take(number[0], "listener")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._take(number, "handler")

    def _take(self, number: int, by: str) -> None:
        # The handler and the listener both see every signal, but another event loop on the main thread may own the
        # wake-up pipe for a while, and Ctrl-C arrives from the terminal and again from the launcher. So each source
        # has its own count, and the first to count two acts; one count for all would take one Ctrl-C for two.
        source = by, number in _FORWARDED
        self._seen[source] += 1
        number, now = _FORWARDED.get(number, number), time.monotonic()
        if self.requested is None:
            self._first_at, self.requested = now, number
        elif (
            self._seen[source] > 1
            and now - self._first_at > DUPLICATE_SIGNAL_WINDOW
            and self._leaving.acquire(blocking=False)
        ):
            # Straight to the descriptor: the main thread may be holding the lock of Python's own buffers.
            os.write(2, f"\n{signal.Signals(number).name} again: stopping at once, without saving\n".encode())
            os._exit(128 + number)


def compile_interruptibly(compile_: Callable[[], T], interrupts: Interrupts) -> T:
    """`compile_()`, run in a thread so that the program can be interrupted meanwhile.

    For one long C++ call, such as the `compile` of a lowered function: trace and lower before, as the current mesh and
    layout belong to the calling thread. Raises `Interrupted` if a stop is requested before it is done (the compiler
    goes on in its thread: exit by `exit_at_once`), and whatever `compile_` raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(compile_())
        except BaseException as error:  # raised again in the calling thread
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name="compile", daemon=True)
    thread.start()
    while thread.is_alive():
        interrupts.check()
        thread.join(0.05)
    if errors:
        raise errors[0]
    return results[0]
