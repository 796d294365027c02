"""How one process of several ends: what is wrong is said once, and nobody waits for one that is gone."""

import os
import threading
import time

from axon.errors import UserError
from axon.launch.cluster import HEARTBEAT_SECONDS, Member
from axon.train.signals import exit_at_once

_LAUNCHER_SECONDS = 2.0
_FIRST_SPEAKS_SECONDS = 5.0
_TOGETHER_SECONDS = 10.0


def let_the_cause_speak(error: BaseException) -> None:
    """Before `error` is shown: time in which whoever knows better may end this process.

    A failed collective is mostly the death of a peer, which the launcher or JAX's heartbeats name; a mistake that
    every process meets is said by process 0.
    """
    member = _joined()
    if member is None:
        return
    import jax

    if isinstance(error, UserError):
        pass
    elif member.launcher is not None:
        time.sleep(_LAUNCHER_SECONDS)
    elif isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(HEARTBEAT_SECONDS + _LAUNCHER_SECONDS)
    if member.index > 0:
        time.sleep(_FIRST_SPEAKS_SECONDS)


def says_it() -> bool:
    """Whether it is for this process to say that the run was interrupted: one of them does, or their launcher."""
    member = _joined()
    return member is None or (member.index == 0 and member.launcher is None)


def part_in_peace() -> None:
    """After an interrupt that all have heard of: wait a little for the others to come as far as this."""
    if _joined() is not None:
        import jax

        parting = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        parting.start()
        parting.join(_TOGETHER_SECONDS)


def leave_alone(code: int) -> None:
    """Ends one of several processes that failed at once: an orderly exit would wait for the others."""
    if code and _joined() is not None:
        exit_at_once(code)


def _joined() -> Member | None:
    member = Member.found(os.environ)
    if member is None:
        return None
    import jax

    return member if jax.distributed.is_initialized() else None
