"""Trackers, to which metrics go besides `metrics.jsonl`: TensorBoard and Weights & Biases, behind one interface."""

import importlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from axon.disk import check_paths, writing
from axon.errors import UserError
from axon.fields import FolderPath


class Tracker(Protocol):
    """Follows one run: `start` once, `log` as often as there is news, `finish` once."""

    def start(self, info: Mapping[str, Any], step: int = 0) -> None:
        """Begins, or continues from `step`; `info` describes the run (versions, hardware, …)."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the metrics of `step`."""
        ...

    def finish(self) -> None:
        """Returns once all that was logged is written."""
        ...


class TrackerConfig(Protocol):
    """A tracker's configuration: opens the tracker of one run."""

    def open(self, run_dir: Path) -> Tracker:
        """A tracker that stores its files in `run_dir`. Raises `UserError` if its package is not installed."""
        ...


@dataclass(frozen=True)
class TensorBoard:
    """TensorBoard event files in `run_dir/folder`; view with `tensorboard --logdir`."""

    folder: FolderPath = "tensorboard"

    def __post_init__(self):
        check_paths(self)

    def open(self, run_dir: Path) -> Tracker:
        """See `TrackerConfig.open`."""
        return _TensorBoardTracker(_imported("tensorboardX", "TensorBoard"), Path(run_dir) / self.folder)


@dataclass(frozen=True)
class WandB:
    """Weights & Biases. `offline` stores the run in `run_dir/wandb`, for `wandb sync` later, and needs no account.

    A resumed run continues the same W&B run, whose id is in `run_dir/wandb/id`.
    """

    project: str = "axon"
    offline: bool = True
    name: str | None = None

    def open(self, run_dir: Path) -> Tracker:
        """See `TrackerConfig.open`."""
        return _WandBTracker(_imported("wandb", "WandB"), self, Path(run_dir))


def _imported(package: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"{what} needs the package {package}, which cannot be imported ({error}): run scripts/setup track"
        ) from error


class _TensorBoardTracker:
    def __init__(self, package: ModuleType, folder: Path):
        self._package, self._folder = package, folder

    def start(self, info: Mapping[str, Any], step: int = 0) -> None:
        # A resumed run logs some steps again: without `purge_step` the curves would have them twice.
        with writing(self._folder):
            self._writer = self._package.SummaryWriter(str(self._folder), purge_step=step or None)
        self._writer.add_text("run", "\n".join(f"- **{name}**: `{value}`" for name, value in info.items()), step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)

    def finish(self) -> None:
        self._writer.close()


class _WandBTracker:
    def __init__(self, package: ModuleType, config: WandB, run_dir: Path):
        self._package, self._config, self._run_dir = package, config, run_dir

    def start(self, info: Mapping[str, Any], step: int = 0) -> None:
        config = self._config
        self._run = self._package.init(
            project=config.project,
            name=config.name or self._run_dir.name,
            id=self._id(),
            resume=None if config.offline else "allow",
            mode="offline" if config.offline else "online",
            dir=str(self._run_dir),
            config=dict(info),
            settings=self._package.Settings(silent=True),
        )
        # W&B's own step can only grow, but a resumed run logs some steps again: so plot over a metric of our own.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**{name: float(value) for name, value in values.items()}, "step": step})

    def finish(self) -> None:
        self._run.finish()

    def _id(self) -> str:
        file = self._run_dir / "wandb" / "id"
        with writing(file):
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(secrets.token_hex(4))
        return file.read_text().strip()
