"""`Worker`, an object in a process of its own, and `Joined`, one in a process that someone else has started: one that
dies or hangs costs the call that it is at."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import Any, NoReturn

START_SECONDS = 120.0
"""The time limit until a process's object is there, its imports included."""


class WorkerError(Exception):
    """The process has died, or was ended since it took too long."""


class Remote(ABC):
    """An object whose methods run in another process, one call after the other.

    Args:
        connection: with that process. make: returns the object; called there, so that it can be pickled: no class or
            function of `__main__`.
    """

    def __init__(self, connection: Connection, make: Callable[[], Any]):
        self._connection, self._make = connection, make

    @property
    @abstractmethod
    def alive(self) -> bool: ...

    @abstractmethod
    def kill(self) -> None:
        """End the process; any thread may, and a call that waits then raises."""

    @abstractmethod
    def close(self) -> None:
        """End it as `kill`, and give back what it had here; in the thread that calls it."""

    @abstractmethod
    def _ended(self) -> str:
        """How the process ended, which is closed, for messages."""

    def call(self, method: str, *args: Any, limit: float) -> Any:
        """What a method returns or raises; at first what `make` raises, for which there are `START_SECONDS`. Raises
        `WorkerError` where the process dies, and `TimeoutError` after `limit` seconds, which ends it."""
        if self._make is not None:
            self._answer(self._make, START_SECONDS)
            self._make = None
        return self._answer((method, args), limit)

    def _answer(self, message: Any, limit: float) -> Any:
        try:
            self._connection.send(message)
            answered = self._connection.poll(limit)
            value, error = self._connection.recv() if answered else (None, None)
        except (EOFError, OSError):
            self.close()
            raise WorkerError(self._ended()) from None
        if not answered:
            self.close()
            raise TimeoutError(f"not done after {limit:g} seconds")
        if error is not None:
            raise error
        return value


class Worker(Remote):
    """An object in a process that is started for it.

    The process is started anew, not forked, and imports what the object needs. It has a group of its own, so that a
    Ctrl-C is not its, and is killed with all that it started. It ends when this process does, however it ends.

    Args:
        make: see `Remote`. environ: variables of the process besides those of this one.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        environ: Mapping[str, str] = MappingProxyType({}),
    ):
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                command(there.fileno()),
                env={**os.environ, "PYTHONPATH": python_path(), **environ},
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(),),
                process_group=0,
            )
        super().__init__(Connection(here.detach()), make)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and all that it has started; any thread may, and a call that waits then raises."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # before it is waited for: until then its number is its own

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._connection.close()

    def _ended(self) -> str:
        return f"its process (pid {self.pid}) {how_ended(self._process.returncode)}"


class Joined(Remote):
    """An object in a process that has joined over the network, and ends with the connection.

    Args:
        make: see `Remote`. name: of the process, for messages.
    """

    def __init__(self, connection: Connection, make: Callable[[], Any], name: str):
        super().__init__(connection, make)
        self._socket, self._name = socket.socket(fileno=os.dup(connection.fileno())), name
        self._open = True

    @property
    def alive(self) -> bool:
        return self._open and not self._connection.poll(0)  # between two calls it has nothing to say but its end

    def kill(self) -> None:
        self._open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.kill()
        self._socket.close()
        self._connection.close()

    def _ended(self) -> str:
        return f"the process on {self._name} has left"


def command(connection: int, *until: int) -> list[str]:
    """The command that serves a `Remote` by the connection that an open file is, and ends with the pipe `until`."""
    return [sys.executable, "-P", "-m", "axon.launch.worker", *map(str, (connection, *until))]


def python_path() -> str:
    """The folders in which this process finds modules, for the environment of another."""
    return os.pathsep.join(folder or os.getcwd() for folder in sys.path)


def how_ended(code: int) -> str:
    """How a process ended with this exit code, or minus a signal, for messages."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _serve(connection: Connection) -> NoReturn:
    """Make the object that the first message asks for, and answer each further one by a method of it."""
    messages: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(connection, messages), daemon=True).start()
    made: Any = None
    while True:
        try:
            if made is None:
                made, value = pickle.loads(messages.get())(), None
            else:
                method, args = pickle.loads(messages.get())
                value = getattr(made, method)(*args)
            connection.send((value, None))
        except BaseException as error:  # also `SystemExit`, of whoever wrote the method
            connection.send((None, portable(error)))


def _receive(connection: Connection, messages: SimpleQueue[bytes]) -> None:
    """In a thread of its own, so that the end of the process that asks ends this one in the middle of a call."""
    while True:
        try:
            messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


def portable(error: BaseException) -> Exception:
    """The error, or one that says the same where it cannot be sent. Its traceback is in its notes."""
    if not isinstance(error, Exception):
        return RuntimeError(repr(error))
    try:
        error.add_note("".join(traceback.format_exception(error)))
        return pickle.loads(pickle.dumps(error))
    except Exception:  # pickle runs code of whoever wrote the error
        return RuntimeError(f"{type(error).__name__}: {error}")


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    descriptors = [int(one) for one in sys.argv[1:]]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    for pipe in descriptors[1:]:
        Thread(target=_end_with, args=(pipe,), daemon=True).start()
    _serve(Connection(descriptors[0]))
