"""Suppress what Orbax logs of a read or a save that fails: we raise its cause, with a message of our own."""

import gc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SETTLE_SECONDS = 0.2
"""So long after an error Orbax's threads still speak of it."""


@contextmanager
def quiet_log() -> Iterator[None]:
    """Drop what Orbax logs. Its logger is absl's, which other code uses too: their lines stay."""
    log, others = logging.getLogger("absl"), _NotOrbax()
    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)


@contextmanager
def quiet_read() -> Iterator[None]:
    """Suppress the output of Orbax while it reads a checkpoint, even if that fails.

    The first array that fails closes Orbax's event loop while the others are still being read. Those then print errors
    after the exception has been raised: TensorStore's threads about the closed loop, asyncio about exceptions never
    retrieved. So a failed read sleeps until they have ended, with both kinds of message suppressed.
    """
    log, awaited, hook = logging.getLogger("asyncio"), _NotUnretrieved(), sys.unraisablehook
    log.addFilter(awaited)
    sys.unraisablehook = lambda problem: None if _is_closed_loop(problem) else hook(problem)
    try:
        with quiet_log():
            yield
    except BaseException:
        time.sleep(SETTLE_SECONDS)
        gc.collect()
        raise
    finally:
        sys.unraisablehook = hook
        log.removeFilter(awaited)


class _NotOrbax(logging.Filter):
    """Passes lines that other code than Orbax's logs: the record does not name the caller, but the stack does."""

    def filter(self, record: logging.LogRecord) -> bool:
        frame = sys._getframe()
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("orbax."):
            frame = frame.f_back
        return frame is None


class _NotUnretrieved(logging.Filter):
    """Passes all but asyncio's lines about exceptions that were never retrieved."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Task exception was never retrieved")


def _is_closed_loop(problem: "sys.UnraisableHookArgs") -> bool:
    return isinstance(problem.exc_value, RuntimeError) and str(problem.exc_value) == "Event loop is closed"
