"""A trained model on the tasks of EleutherAI's lm-eval harness."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from axon.errors import UserError, suggest
from axon.run.inspect import restored
from axon.run.trained import Trained, open_trained
from axon.serve.text_model import TextModel, check_writes

Report = Callable[[str], None]

RESAMPLES = 1000
"""Of the bootstrap, for standard errors that have no formula."""

REPORTED = "results", "versions", "n-shot", "n-samples"
"""What is reported of an evaluation."""


def evaluate_tasks(
    path: str | Path,
    names: Sequence[str],
    report: Report,
    *,
    folder: Path | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    adapter: str | None = None,
) -> dict[str, Any]:
    """What the harness found: `results`, name of each task → metric → value, `versions`, `n-shot` and `n-samples`.

    Args:
        path: the folder of a run, or `hf:DIR_OR_NAME`.
        names: tasks, groups or tags. folder: has task files besides the harness's own.
        limit: documents of each task; None for all.
        max_length: as of `sequence_positions`. adapter: as of `axon.run.inspect.restored`.

    Raises `UserError` where the extra `eval` is missing, for unknown tasks, for a model that writes no texts, and
    for longer sequences than it takes.
    """
    suite = Suite.of(names, folder, limit)
    trained = open_trained(path)
    found = suite.evaluate(trained, task_positions(trained, path, max_length), report, adapter)
    return {name: found[name] for name in REPORTED}


def task_positions(trained: Trained, path: str | Path, max_length: int | None) -> int:
    """Positions of a task's sequences, as of `sequence_positions`, for the trained model of `path`.

    Raises `UserError` for a model that writes no texts.
    """
    # Before its runtime, which names the objective: that of a model that writes no text has another.
    module = trained.train.model.build()
    if not isinstance(module, TextModel):
        raise UserError(
            f"--tasks: {path} is a {type(trained.train.model).__name__}; expected a model that writes texts"
        )
    check_writes(module)
    return sequence_positions(max_length, trained, module)


@dataclass(frozen=True)
class Suite:
    """Tasks of the harness by `names`, that its `index` has; `limit`: documents of each, None for all."""

    names: Sequence[str]
    index: Any
    limit: int | None

    @classmethod
    def of(cls, names: Sequence[str], folder: Path | None, limit: int | None) -> "Suite":
        """Of what `evaluate_tasks` takes. Raises `UserError` without the extra `eval`, and for unknown tasks."""
        _check_installed()
        return cls(names, _tasks(names, folder), limit)

    def evaluate(
        self, trained: Trained, positions: int, report: Report, adapter: str | None = None, *, samples: bool = False
    ) -> Any:
        """What the harness returns of a trained model. `samples`: with the metrics of each document.

        What fails before it asks the model anything is a fault of the tasks' files."""
        # Standard errors would be computed in forked processes, and JAX's threads do not survive a fork.
        os.environ.setdefault("DISABLE_MULTIPROC", "1")
        from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]

        from axon.run.harness import harness_model

        tokenizer = trained.tokenizer.load()
        model = harness_model(*restored(trained, report, adapter=adapter), tokenizer, positions)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # the harness prints what it does
                found = simple_evaluate(
                    model,
                    tasks=list(self.names),
                    limit=self.limit,
                    bootstrap_iters=RESAMPLES,
                    log_samples=samples,
                    task_manager=self.index,
                )
        except Exception as error:
            if model.asked or isinstance(error, UserError):
                raise
            raise UserError(
                f"--tasks: lm-eval cannot prepare {', '.join(self.names)}: {type(error).__name__}: {error}. Correct "
                "the task's file, or its text"
            ) from error
        model.report_cuts(report)
        return found


def sequence_positions(wanted: int | None, trained: Trained, module: TextModel) -> int:
    """Positions of a task's sequences: `wanted`, or where that is None those of `trained.train`.

    Raises `UserError` for more than `module` has, or than `trained` was trained on.
    """
    known = [positions for positions in (module.max_length, trained.trained_length) if positions is not None]
    if wanted is None:
        return min([trained.train.seq, *known])
    if known and wanted > min(known):
        text = "has" if module.max_length == min(known) else "was trained on sequences of"
        raise UserError(
            f"--max-length is {wanted}, and the model {text} {min(known)} positions: lower it to at most that, or "
            "leave it out"
        )
    return wanted


class Metric(NamedTuple):
    """The value of a task's metric, of answers after a filter; `error`: its standard error, None where it has none."""

    task: str
    metric: str
    filter: str
    value: float
    error: float | None

    @property
    def name(self) -> str:
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"


def metrics_of(results: Mapping[str, Mapping[str, Any]]) -> list[Metric]:
    """The metrics in the `results` of the harness."""
    found = []
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not filtered:
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            found.append(Metric(task, metric, filtered, value, error if isinstance(error, int | float) else None))
    return found


def with_error(value: float, error: float | None) -> str:
    """A value and, where there is one, its standard error."""
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each metric of each task."""
    return [f"{one.task}: {one.name} {with_error(one.value, one.error)}" for one in metrics_of(results)]


def _check_installed() -> None:
    if find_spec("lm_eval") is None:
        raise UserError("--tasks needs EleutherAI's lm-eval harness: pip install 'axon-jax[eval]'")


def _tasks(names: Sequence[str], folder: Path | None) -> Any:
    """The index of tasks: of `folder` alone where it has all of `names`, as that of the harness takes seconds."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    found = ""
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"--task-folder: {folder} is not a folder")
        own = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
        found = f" {folder} has {', '.join(sorted(own.all_tasks)) or 'no task file that lm-eval can read'}."
    tasks = TaskManager(include_path=folder)
    for name in names:
        if name not in tasks.all_tasks:
            raise UserError(f"--tasks: there is no task {name!r}.{suggest(name, tasks.all_tasks)}{found}")
    return tasks
