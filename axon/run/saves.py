"""Saving a run's state, with the events of it: how long training waited, when all was on disk, and when copied."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from axon.checkpoint import RunStore
from axon.checkpoint.mirror import Mirror
from axon.observe.events import Events


class Saves:
    """Saves into a store, and has `mirror` copy it, if there is one. A context manager, which waits for the save in
    progress."""

    def __init__(self, store: RunStore, events: Events, mirror: Mirror | None = None):
        self._store, self._events, self._mirror = store, events, mirror
        self._pending: tuple[int, float, bool] | None = None

    def save(self, step: int, state: Any, extra: Mapping[str, Any], specs: Any, durable: bool = True) -> None:
        """Saves as `RunStore.save` does, unless this step is saved already where it is to be."""
        if step == self._store.started(durable):
            if self._mirror is not None and durable and self._pending is None:
                self._mirror.saved(step)  # of an earlier start, which may not have copied it
            return
        began = time.monotonic()
        self.wait()
        self._events.record("save_begin", step, **({} if durable else {"local": True}))
        self._store.save(step, state, extra, specs, durable=durable)
        self._pending = step, began, durable
        self._events.record("save_blocked", step, seconds=round(time.monotonic() - began, 6))
        self.look()

    def look(self) -> None:
        """Records the save in progress as complete, once it is. Costs microseconds: to be called in every step.

        It waits for nothing, not even for a save that has ended: processes that wait, wait for each other.
        """
        if self._pending is not None and not self._store.saving() and self._pending[0] in self._store.steps():
            self._store.write_checksums()
            self._complete()
        if self._mirror is not None:
            self._mirror.look()

    def wait(self) -> None:
        """Returns when the save in progress is complete. Raises `CheckpointError` if it failed."""
        self._store.wait()
        self._complete()

    def _complete(self) -> None:
        if self._pending is not None:
            step, began, durable = self._pending
            self._pending = None
            self._events.record("save_end", step, seconds=round(time.monotonic() - began, 6))
            if self._mirror is not None and durable:
                self._mirror.saved(step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if error is None:
            self.wait()


class NoSaves(Saves):
    """Of a run whose state nobody keeps."""

    def save(self, step: int, state: Any, extra: Mapping[str, Any], specs: Any, durable: bool = True) -> None:
        """Saves nothing."""
