"""A tuned model on tasks of lm-eval's harness, beside the model that it was tuned from."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from axon.errors import UserError
from axon.run.init_from import InitFrom
from axon.run.tasks import REPORTED, Metric, Suite, metrics_of, task_positions, with_error
from axon.run.trained import TrainedHub, open_trained

Report = Callable[[str], None]


def evaluate_before_and_after(
    path: str | Path,
    names: Sequence[str],
    report: Report,
    *,
    folder: Path | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    adapter: str | None = None,
) -> dict[str, Any]:
    """What `axon.run.tasks.evaluate_tasks` gives, `before` and `after`, and `changes`, a `Change` of each metric as a
    dict. Arguments as there: before is what the run started from or, with an `adapter`, the model without it.

    Both are evaluated on sequences of as many positions. Raises `UserError` for a run that started from nothing too.
    """
    suite = Suite.of(names, folder, limit)
    sides = {"before": (path, None) if adapter is not None else start_of(path), "after": (path, adapter)}
    positions = min(task_positions(open_trained(source), source, max_length) for source, _ in sides.values())
    found = {}
    for side, (source, beside) in sides.items():
        report(f"{side}: {source}{f' with {beside}' if beside else ''}")
        found[side] = suite.evaluate(open_trained(source), positions, report, beside, samples=True)
    reported = {side: {name: one[name] for name in REPORTED} for side, one in found.items()}
    return {**reported, "changes": [one._asdict() for one in changes(**found)]}


def start_of(path: str | Path) -> tuple[str, str | None]:
    """What a run was started from: another model, and an adapter beside that. Raises `UserError` if from nothing."""
    trained = open_trained(path)
    if isinstance(trained, TrainedHub):
        raise UserError(
            f"--before: {path} does not say what it was tuned from. Name the folder of a run, or a model with --adapter"
        )
    start = trained.train.init_from
    if start is None:
        raise UserError(
            f"--before: {path} began from initial values (its Train.init_from is None), so that nothing was "
            "before it: leave out --before"
        )
    return (start.source, start.adapter) if isinstance(start, InitFrom) else (start, None)


class Change(NamedTuple):
    """A task's metric before and after, and the difference, after less before; `*_error`: standard errors, None where
    there is none."""

    task: str
    metric: str
    filter: str
    before: float
    before_error: float | None
    after: float
    after_error: float | None
    difference: float
    difference_error: float | None


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The changes between two results of the harness, with the samples of both, of the same documents.

    The standard error of a difference of means is that of the documents' differences (Miller, arXiv:2411.00640,
    section 4.2), since what is hard for one model is hard for the other; of other metrics, and of groups of tasks, that
    of two independent values.
    """
    others = {one[:3]: one for one in metrics_of(before["results"])}
    found = []
    for new in metrics_of(after["results"]):
        old = others[new[:3]]
        error = _paired_error(old, new, before["samples"], after["samples"])
        found.append(Change(*old, new.value, new.error, new.value - old.value, error))
    return found


def _paired_error(old: Metric, new: Metric, before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    pair = [_by_document(metric, samples) for metric, samples in ((old, before), (new, after))]
    if pair[0] and pair[1] and pair[0].keys() == pair[1].keys() and len(pair[0]) > 1:
        differences = [value - pair[0][document] for document, value in pair[1].items()]
        return float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return None if old.error is None or new.error is None else math.hypot(old.error, new.error)


def _by_document(metric: Metric, samples: Mapping[str, Any]) -> dict[int, float]:
    """Document → its value, of a metric that is the mean of these; of another none."""
    rows = [one for one in samples.get(metric.task, ()) if one["filter"] == metric.filter]
    values = {one["doc_id"]: one.get(metric.metric) for one in rows}
    numbers = {document: float(value) for document, value in values.items() if isinstance(value, int | float)}
    is_mean = len(numbers) == len(rows) > 0 and math.isclose(
        np.mean(list(numbers.values())), metric.value, abs_tol=1e-9
    )
    return numbers if is_mean else {}


def change_table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each of the `changes` of `evaluate_before_and_after`, under a head, in columns."""
    rows = [("task", "metric", "before", "after", "difference")]
    for one in (Change(**fields) for fields in found):
        name = Metric(*one[:5]).name
        difference = with_error(one.difference, one.difference_error)
        sign = "" if one.difference < 0 else "+"
        values = with_error(one.before, one.before_error), with_error(one.after, one.after_error)
        rows.append((one.task, name, *values, sign + difference))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
