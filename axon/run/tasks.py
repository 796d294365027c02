"""A trained model on the tasks of EleutherAI's lm-eval harness."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from axon.errors import UserError, suggest
from axon.run.inspect import restored
from axon.run.trained import Trained, open_trained
from axon.serve.text_model import TextModel

Report = Callable[[str], None]

RESAMPLES = 1000
"""Of the bootstrap, for standard errors that have no formula."""


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
    _check_installed()
    from axon.run.harness import harness_model

    tasks = _tasks(names, folder)
    trained = open_trained(path)
    train = trained.train
    # Before its runtime, which names the objective: that of a model that writes no text has another.
    module = train.model.build()
    if not isinstance(module, TextModel):
        raise UserError(f"--tasks: {path} is a {type(train.model).__name__}; expected a model that writes texts")
    positions = sequence_positions(max_length, trained, module)
    tokenizer = trained.tokenizer.load()
    model = harness_model(*restored(trained, report, adapter=adapter), tokenizer, positions)
    found = _evaluate(model, names, tasks, limit)
    model.report_cuts(report)
    return {name: found[name] for name in ("results", "versions", "n-shot", "n-samples")}


def _evaluate(model: Any, names: Sequence[str], tasks: Any, limit: int | None) -> Any:
    """What the harness returns. What fails before it asks the model anything is a fault of the tasks' files."""
    # Standard errors would be computed in forked processes, and JAX's threads do not survive a fork.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]

    try:
        with contextlib.redirect_stdout(sys.stderr):  # the harness prints what it does
            return simple_evaluate(
                model,
                tasks=list(names),
                limit=limit,
                bootstrap_iters=RESAMPLES,
                log_samples=False,
                task_manager=tasks,
            )
    except Exception as error:
        if model.asked or isinstance(error, UserError):
            raise
        raise UserError(
            f"--tasks: lm-eval cannot prepare {', '.join(names)}: {type(error).__name__}: {error}. Correct the task's "
            "file, or its text"
        ) from error


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


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each metric of each task: its value and, where there is one, its standard error."""
    lines = []
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not filtered:
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            spread = f" ± {error:.4f}" if isinstance(error, int | float) else ""
            lines.append(f"{task}: {metric}{'' if filtered == 'none' else f' ({filtered})'} {value:.4f}{spread}")
    return lines


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
