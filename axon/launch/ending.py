"""How one process of several ends: the root cause is reported once, and no process waits for one that has ended."""

import os
import sys
import threading
import time

from axon.errors import UserError
from axon.launch.cluster import HEARTBEAT_SECONDS, Process
from axon.launch.signals import exit_at_once

_LAUNCHER_SECONDS = 2.0
_FIRST_SPEAKS_SECONDS = 5.0
_TOGETHER_SECONDS = 10.0


def wait_for_root_cause(error: BaseException) -> None:
    """Sleep before `error` is shown, so that whatever knows the root cause can report it and end this process first.

    A failed collective is mostly the death of a peer, which the launcher or JAX's heartbeats name; a `UserError` that
    every process raises is reported by process 0.
    """
    process = _joined()
    if process is None:
        return
    import jax

    if isinstance(error, UserError):
        pass
    elif process.launcher is not None:
        time.sleep(_LAUNCHER_SECONDS)
    elif isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(HEARTBEAT_SECONDS + _LAUNCHER_SECONDS)
    if process.index > 0:
        time.sleep(_FIRST_SPEAKS_SECONDS)


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
    """End one of several processes that failed: an orderly exit would wait for the others."""
    if code and _joined() is not None:
        exit_at_once(code)


def _joined() -> Process | None:
    jax = sys.modules.get("jax")  # a process that has not imported it has not joined
    return Process.found(os.environ) if jax is not None and jax.distributed.is_initialized() else None
