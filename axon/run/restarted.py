"""A run that is started again when it dies."""

from typing import Any

from axon.launch.restarts import Supervisor
from axon.observe.events import record_event
from axon.run.folder import RunFolder
from axon.run.tree import Train


def run_with_restarts(train: Train, restarts: int) -> int:
    """The process's command, run in a process of its own and again when that dies; the exit code."""
    folder = RunFolder(train.folder)

    def record(kind: str, step: int | None, **values: Any) -> None:
        if folder.config.is_file():  # else it died before it was a run
            record_event(folder.events, kind, step, **values)

    def latest() -> int | None:
        return folder.reader(train.checkpoints).latest()

    return Supervisor(restarts, latest, record).run()
