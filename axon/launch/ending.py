"""How one process of several ends: the root cause is reported once, and no process waits for one that has ended."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from axon.errors import UserError
from axon.launch.cluster import HEARTBEAT_SECONDS, Process
from axon.launch.signals import exit_at_once

_LAUNCHER_SECONDS = 2.0
_FIRST_SPEAKS_SECONDS = 5.0
_TOGETHER_SECONDS = 10.0
_LEAVE_SECONDS = 5.0
_WATCH_SECONDS = 0.05
_LEFT = "axon/left/"
"""Below this key each process but the first says that it has reported its error."""


def waits_to_report(error: BaseException, reason: str) -> bool:
    """Whether this process is to show `error`, after a time in which whatever knows the root cause reports it.

    The other processes are told the `reason`, and end too where they wait for this one. A failed collective is mostly
    the death of a peer, which the launcher or JAX's heartbeats name. What every process raises is reported by process
    0, but for a `ProcessesError`: each process may have a log of its own.
    """
    process = _joined()
    if process is None:
        return True
    import jax

    from axon.launch.key_value import ENDED, ProcessesError

    if not isinstance(error, jax.errors.JaxRuntimeError):
        _say(f"{ENDED}{process.index}", reason)
    if not isinstance(error, UserError):
        if process.launcher is not None:
            time.sleep(_LAUNCHER_SECONDS)
        elif isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(HEARTBEAT_SECONDS + _LAUNCHER_SECONDS)
    if process.index == 0 or (process.launcher is None and isinstance(error, ProcessesError)):
        return True
    if process.launcher is not None:  # which shows what process 0 says, and ends this one
        time.sleep(_FIRST_SPEAKS_SECONDS)
        return True
    return _said([f"{ENDED}0"], _FIRST_SPEAKS_SECONDS) != [reason]


def reports_interrupt() -> bool:
    """Whether this process reports that the run was interrupted: one of them does, or their launcher."""
    process = _joined()
    return process is None or (process.index == 0 and process.launcher is None)


def shutdown_gracefully() -> None:
    """After an interrupt on which all agreed: disconnect, waiting for the others for some seconds at most."""
    if _joined() is not None:
        import jax

        shutdown = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(_TOGETHER_SECONDS)


def exit_without_waiting(code: int) -> None:
    """End one of several processes that failed: an orderly exit would wait for the others.

    Process 0 goes last, if they end within some seconds: without it, JAX would kill them.
    """
    process = _joined()
    if code and process is not None:
        if process.index > 0:
            _say(f"{_LEFT}{process.index}", "")
        elif process.launcher is None:
            _said([f"{_LEFT}{index}" for index in range(1, process.count)], _LEAVE_SECONDS)
            time.sleep(4 * _WATCH_SECONDS)  # from what they say to their end
        exit_at_once(code)


def _say(key: str, value: str) -> None:
    from axon.launch import key_value

    with suppress(Exception):  # whatever is wrong with the others, this process has its own error to report
        key_value.put(key, value)


def _said(keys: Sequence[str], seconds: float) -> list[str | None]:
    """The values of `keys`, waiting for all of them for so long at most."""
    from axon.launch import key_value

    values: list[str | None] = [None] * len(keys)
    until = time.monotonic() + seconds
    while None in values and time.monotonic() < until:
        with suppress(Exception):
            values = [key_value.get(key) for key in keys]
        time.sleep(_WATCH_SECONDS)
    return values


def _joined() -> Process | None:
    jax = sys.modules.get("jax")  # a process that has not imported it has not joined
    return Process.found(os.environ) if jax is not None and jax.distributed.is_initialized() else None
