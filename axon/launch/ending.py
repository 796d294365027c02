"""How one process of several ends: what is wrong is said once, and nobody waits for one that is gone."""

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
    """Before `error` is shown: time in which whoever knows better may end this process.

    A failed collective is mostly the death of a peer, which the launcher or JAX's heartbeats name; a mistake that
    every process meets is said by process 0.
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
    """Whether it is for this process to say that the run was interrupted: one of them does, or their launcher."""
    process = _joined()
    return process is None or (process.index == 0 and process.launcher is None)


def shutdown_gracefully() -> None:
    """After an interrupt that all have heard of: wait a little for the others to come as far as this."""
    if _joined() is not None:
        import jax

        parting = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        parting.start()
        parting.join(_TOGETHER_SECONDS)


def exit_without_waiting(code: int) -> None:
    """Ends one of several processes that failed at once: an orderly exit would wait for the others."""
    if code and _joined() is not None:
        exit_at_once(code)


def _joined() -> Process | None:
    jax = sys.modules.get("jax")  # who has not imported it has joined nobody
    return Process.found(os.environ) if jax is not None and jax.distributed.is_initialized() else None
