"""A run's `events.jsonl`: what happened besides steps, one JSON object per line.

Each has `time` (seconds since 1970), `step` (or null), `kind`, and what belongs to the kind:

start: a process begins: `devices`, `device_kind`, `mesh`, `processes`, `until`, `pid`, `host`
resume: from a checkpoint: `lost_steps` and `lost_seconds` are repeated; `changed`: what differs since the last start
compile_begin, compile_end: of the training step; `seconds`
steps: a stretch between saves and evaluations: `first`, `seconds`, `data_seconds` of it waiting for data, `memory`
save_begin, save_blocked, save_end: `seconds` that training waited, and until all was on disk
mirrored, mirror_failed: a checkpoint was copied to `Checkpoints.mirror`: `seconds`, `bytes`; or was not: `error`
fetched: a checkpoint was taken from there: `seconds`, `bytes`; `damaged`: a line about each later one
evaluation: `seconds`, `loss`; `answers`, the first of those to held-out questions: of each `question`, `expected` and
    `answer`, texts, `scores`, name → number, and whose it is, `adapter`, where several are trained at once
stop: a person or the machine asked to stop: `signal`
not_finite, spike: a fault at a step: `loss`, `grad_norm`, `policy`, `batch`, and the `documents` in it
skip, rollback: what was done about it
replay: a step was done twice (`Faults.replay_every`), which took `seconds` longer: how many arrays are `differing`, and
    the first of these `arrays`, each with the devices on which it does
hang: nothing went on for `seconds` in `phase`; `stacks` is the file that has the threads' stacks
restart, give_up: of `axon train --restarts`: how the process ended, and the `seconds` to wait
end: a process ends: `outcome` (done, interrupted, failed), `seconds`, `error`
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from axon.errors import UserError
from axon.foreign_json import NULL, NUMBER, TEXT, list_of, number, object_of, object_with
from axon.launch.signals import Interrupted
from axon.observe import lines
from axon.observe.lines import LinesFile, Record, read_lines

ANSWER = object_with({**dict.fromkeys(("question", "expected", "answer"), TEXT), "scores": object_of(NUMBER | NULL)})
REQUIRED = {"time": number("[0, 2**37)"), "kind": TEXT}
FIELDS = (
    lines.FIELDS
    | REQUIRED
    | dict.fromkeys(("seconds", "data_seconds", "lost_steps", "lost_seconds"), NUMBER | NULL)
    | dict.fromkeys(("outcome", "error"), TEXT | NULL)
    | {"memory": object_of(NUMBER) | NULL, "answers": list_of(ANSWER) | NULL}
)
"""Those that Axon itself reads."""


class Events:
    """The events of one call of `axon train`, in a process that writes none: a context manager."""

    def record(self, kind: str, step: int | None = None, **values: Any) -> None:
        """Appends an event. Raises `UserError` if it cannot be written."""

    def last(self, kind: str) -> Record | None:
        """The latest event of this kind, of any call. None in processes that do not write."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        pass


def events(path: Path) -> Events:
    """The events of this process: process 0 writes, the others do not."""
    return FileEvents(path) if jax.process_index() == 0 else Events()


def read_events(path: Path) -> list[Record]:
    """All events of a run, in order, as `read_lines` reads them."""
    return read_lines(path, FIELDS, REQUIRED)


def record_event(path: Path, kind: str, step: int | None = None, **values: Any) -> None:
    """Appends one event, of a process that is not the run's own, while no other writes."""
    with LinesFile(path) as file:
        file.append(_event(kind, step, values))


def _event(kind: str, step: int | None, values: Record) -> Record:
    return {"time": round(time.time(), 3), "step": step, "kind": kind, **values}


class FileEvents(Events):
    """Appends to `events.jsonl`, and the end of the context as the last of them."""

    def __init__(self, path: Path):
        self._file = LinesFile(path)
        self._since = time.monotonic()

    def record(self, kind: str, step: int | None = None, **values: Any) -> None:
        self._file.append(_event(kind, step, values))

    def last(self, kind: str) -> Record | None:
        return next((event for event in reversed(read_events(self._file.path)) if event["kind"] == kind), None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        with self._file:
            values: Record = {} if error is None else {"error": _first_line(error)}
            seconds = round(time.monotonic() - self._since, 3)
            try:
                self.record("end", outcome=_outcome(error), seconds=seconds, **values)
            except UserError:
                if error is None:
                    raise  # else what ended the run is the news


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:500]
