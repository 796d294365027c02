"""Copying a run's checkpoints to a `Remote` while training goes on.

One thread, in process 0, brings the remote up to date whenever a checkpoint is complete: those that `Checkpoints` keeps
are copied, the newest first, and all others deleted. Training never waits for it, and never ends by it: what fails
is told, and done again after the next save. The step that is being copied is kept in the run's folder for so long.
"""

import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from axon.checkpoint.keep import steps_to_keep
from axon.checkpoint.ownership import STATE
from axon.checkpoint.reader import Reader, listed
from axon.checkpoint.remote import Copy, Remote, copy_of
from axon.checkpoint.tiers import RunStore
from axon.checkpoint.verify import damage_here
from axon.errors import UserError

FINISH_SECONDS = 3600.0
"""How long a run waits at its end for the last copy."""


class Told(NamedTuple):
    """What has happened: the kind of an event and its values, and a line for a person, if it needs one."""

    kind: str
    step: int
    values: dict[str, Any]
    line: str | None = None


class Tell(Protocol):
    """Records an event, as `axon.observe.events.Events.record`."""

    def __call__(self, kind: str, step: int | None = None, **values: Any) -> None: ...


def owner() -> str:
    """A name that no other process has."""
    return f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})"


class Mirror:
    """Keeps a remote up to date with the run's folder. A context manager, whose end waits for the last copy.

    Args:
        remote: claimed by `owner`. folder, store: the run's.
        record, report: called with events and lines, in the thread that calls `look`.
    """

    def __init__(
        self,
        remote: Remote,
        owner: str,
        folder: Path,
        store: RunStore,
        record: Tell,
        report: Callable[[str], None],
    ):
        self._remote, self._owner, self._folder = remote, owner, folder
        self._store, self._record, self._report = store, record, report
        self._local = Reader(folder / "checkpoints")
        self._due: SimpleQueue[int | None] = SimpleQueue()
        self._events: deque[Told] = deque()
        self._last = 0
        self._thread = Thread(target=self._work, name="axon mirror", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._due.put(None)
        self._thread.join(1.0)
        if self._thread.is_alive():
            self._report(f"waiting for the copy to {self._remote.location}, {FINISH_SECONDS / 60:.0f} minutes at most")
            self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            line = f"the copy to {self._remote.location} has not ended: the same command, here, goes on with it"
            self._events.append(Told("mirror_failed", self._last, {"error": "not done in time"}, line))
        self.look()

    def saved(self, step: int) -> None:
        """To be called when the checkpoint of `step` is complete, with its checksums, and so are all before it."""
        self._due.put(step)

    def look(self) -> None:
        """Records and reports what has happened. Costs microseconds."""
        while self._events:
            told = self._events.popleft()
            self._record(told.kind, told.step, **told.values)
            if told.line is not None:
                self._report(told.line)

    def _work(self) -> None:
        step: int | None = 0
        while step is not None:
            step = self._due.get()
            while step is not None and not self._due.empty():  # what is due later includes it
                self._last, step = step, self._due.get()
            self._last = step or self._last
            try:
                self._bring_up_to_date()
            except FileNotFoundError:
                pass  # a checkpoint was deleted before it was its turn, since there are newer ones
            except Exception as error:  # whatever it is, the training goes on
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        why = str(error) if isinstance(error, UserError) else repr(error)
        line = (
            f"checkpoint {self._last} is not copied: {why}\nIt is tried again after the next save, or at the next start"
        )
        self._events.append(Told("mirror_failed", self._last, {"error": why.splitlines()[0]}, line))

    def _bring_up_to_date(self) -> None:
        """Copies and deletes. Of later steps than the last that is complete here, which a run that went on from an
        earlier one makes again, all stay as they are."""
        self._remote.check_owner(self._owner)
        there = {copy.step: copy for copy in self._remote.copies() if copy.step <= self._last}
        intact = [step for step in self._local.steps() if step <= self._last and not self._local.lacks_files(step)]
        here = {step: copy_of(self._folder, step) for step in intact}
        saved = {step: copy.saved for step, copy in {**there, **here}.items()}
        retained = steps_to_keep(self._store.checkpoints, self._store.losses, saved)
        due = sorted((here[step] for step in retained & here.keys() if here[step] != there.get(step)), reverse=True)
        for copy in due[:1]:
            self._copy(copy)
        for step in self._remote.steps() - retained:
            if step <= self._last:
                self._remote.remove(step)
        for copy in due[1:]:
            if self._due.empty():  # else there is a newer one
                self._copy(copy)
        self._remote.put_files(self._folder)

    def _copy(self, copy: Copy) -> None:
        began = time.monotonic()
        self._store.copying.add(copy.step)
        try:
            self._check_intact(copy.step)
            size = self._remote.put(copy, self._folder)
        finally:
            self._store.copying.discard(copy.step)
        self._events.append(Told("mirrored", copy.step, {"seconds": round(time.monotonic() - began, 3), "bytes": size}))

    def _check_intact(self, step: int) -> None:
        """Raise `UserError` for a checkpoint that is damaged here: a copy of it may replace one that is intact."""
        found = damage_here(self._local.directory / str(step), STATE)
        if found and (self._local.directory / str(step)).exists():
            raise UserError(f"{self._local.directory / str(step)} is damaged: {listed(found)}")
