"""The records of a run: metrics, trackers, the progress line, and the loss curve at the end."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import jax

from axon.observe.metrics import MetricsFile, Record, missing_steps, read_metrics
from axon.observe.plot import plot_experts, plot_loss
from axon.observe.progress import Progress
from axon.observe.trackers import Tracker, TrackerConfig
from axon.train.by_adapter import LOSS


class Folder(Protocol):
    """Where a run stores its metrics and its loss curve; implemented by `axon.run.folder.RunFolder`."""

    path: Path
    metrics: Path
    plot: Path


class Journal:
    """The log of one call of `axon train`, in a process that writes none: a context manager."""

    def begin(self, info: Mapping[str, Any], start: int) -> list[Record]:
        """Continues from step `start`: records of later steps are dropped, and returned."""
        return []

    def roll_back(self, step: int) -> list[Record]:
        """Drops the records of steps after `step`, and returns them: they are done again."""
        return []

    def stepped(self, record: Record) -> None:
        """Logs a training step's metrics."""

    def evaluated(self, record: Record) -> None:
        """Logs an evaluation's metrics."""

    def has_evaluation(self, step: int) -> bool:
        """Whether step `step` has been evaluated, now or in an earlier call. False in processes that do not write."""
        return False

    def plot(self, unit: str) -> None:
        """Draws the loss curve, in nats per `unit`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        pass


def journal(folder: Folder, trackers: Sequence[TrackerConfig], until: int, report: Callable[[str], None]) -> Journal:
    """The journal of this process: process 0 alone writes. `report`: called with a line on missing metrics."""
    return FileJournal(folder, trackers, until, report) if jax.process_index() == 0 else Journal()


class FileJournal(Journal):
    """Writes to the run's folder, its trackers and the terminal."""

    def __init__(self, folder: Folder, trackers: Sequence[TrackerConfig], until: int, report: Callable[[str], None]):
        self._folder, self._until, self._report = folder, until, report
        self._open = ExitStack()
        self._trackers: list[Tracker] = [tracker.open(folder.path) for tracker in trackers]

    def begin(self, info: Mapping[str, Any], start: int) -> list[Record]:
        self._metrics = self._open.enter_context(MetricsFile(self._folder.metrics))
        dropped = self._metrics.cut_back(start)
        begun = info.get("parent", {}).get("step", 0)
        if missing := missing_steps(read_metrics(self._folder.metrics), start, begun):
            which = ", ".join(map(str, missing[:3])) + (", …" if len(missing) > 3 else "")
            self._report(
                f"{self._folder.metrics} lacks {len(missing):,} of the {start - begun:,} steps so far: {which}"
            )
        for tracker in self._trackers:
            tracker.start(info, start)
            self._open.callback(tracker.finish)
        if start < self._until:
            self._progress = self._open.enter_context(Progress(self._until))
        return dropped

    def roll_back(self, step: int) -> list[Record]:
        return self._metrics.cut_back(step)

    def stepped(self, record: Record) -> None:
        self.evaluated(record)
        losses = {name.removeprefix(LOSS): value for name, value in record.items() if name.startswith(LOSS)}
        self._progress.update(record["step"], record["loss"], record["tokens_per_second"], record["mfu"], losses)

    def evaluated(self, record: Record) -> None:
        self._metrics.append(record)
        numbers = {name: value for name, value in record.items() if name != "step" and value is not None}
        for tracker in self._trackers:
            tracker.log(record["step"], numbers)

    def has_evaluation(self, step: int) -> bool:
        return any(
            "eval_loss" in record and record.get("step") == step for record in read_metrics(self._folder.metrics)
        )

    def plot(self, unit: str) -> None:
        records = read_metrics(self._folder.metrics)
        plot_loss(records, self._folder.plot, unit, self._folder.path.name)
        plot_experts(records, self._folder.plot.with_name("experts.png"))

    def __enter__(self) -> Self:
        self._open.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._open.__exit__(kind, error, trace)
