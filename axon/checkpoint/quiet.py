"""What Orbax prints of a read or a save that fails is kept from the terminal: its cause is raised, and said by us."""

import gc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SETTLE_SECONDS = 0.2


@contextmanager
def quiet_log() -> Iterator[None]:
    """Within, what Orbax logs is dropped. The log is absl's, in which others write too: their lines stay."""
    log, others = logging.getLogger("absl"), _NotOrbax()
    log.addFilter(others)
    try:
        yield
    finally:
        log.removeFilter(others)


@contextmanager
def quiet_read() -> Iterator[None]:
    """Within, Orbax reads a checkpoint, quietly even if that fails.

    The first array that fails ends Orbax's event loop under the reads of all the others. They complain on their own:
    TensorStore's threads of the closed loop, asyncio of errors that nobody waits for. So they are waited for here.
    """
    log, awaited, hook = logging.getLogger("asyncio"), _Awaited(), sys.unraisablehook
    log.addFilter(awaited)
    sys.unraisablehook = lambda problem: None if _is_closed_loop(problem) else hook(problem)
    try:
        with quiet_log():
            yield
    except BaseException:
        time.sleep(_SETTLE_SECONDS)
        gc.collect()
        raise
    finally:
        sys.unraisablehook = hook
        log.removeFilter(awaited)


class _NotOrbax(logging.Filter):
    """Lines logged by other code than Orbax's: absl does not tell, but the stack does."""

    def filter(self, record: logging.LogRecord) -> bool:
        frame = sys._getframe()
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("orbax."):
            frame = frame.f_back
        return frame is None


class _Awaited(logging.Filter):
    """Lines about anything but errors that nobody waited for."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Task exception was never retrieved")


def _is_closed_loop(problem: "sys.UnraisableHookArgs") -> bool:
    return isinstance(problem.exc_value, RuntimeError) and str(problem.exc_value) == "Event loop is closed"
