"""`axon plan --scale`: weak and strong scaling of a run over sizes of a machine, as a table and as JSON."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from axon.errors import UserError
from axon.plan.predict.failures import Failures
from axon.plan.predict.seconds import BUBBLE, COMMUNICATION
from axon.plan.search.scaling import Point, Scaling, scaling
from axon.show.plan import mesh_text, plan_json
from axon.show.planning import read_question, resized
from axon.show.question import Question

_SIZES = re.compile(r"(\d+)\.\.(\d+)")


def scale_config(question: Question, sizes: str, failures: Failures, say: Callable[[str], None]) -> Scaling:
    """The best plans of a run on machines of `sizes`, as `64..16384`: doubled again and again.

    The machine of `question` is the one whose chips, slices and hosts the others have, and which has the config's own
    batch. Raises as `axon.show.planning.plan_config`, and `UserError` for sizes that are none or that no such machine
    has.
    """
    counts = [*_doubled(sizes)]
    tree, start = read_question(question)
    machines = [start.target.resized(count) for count in counts]
    return scaling(start, machines, failures, lambda one, batch: resized(start, tree, one, batch), say)


def _doubled(sizes: str) -> Iterator[int]:
    """`64..512` as 64, 128, 256, 512."""
    match = _SIZES.fullmatch(sizes)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < first <= last <= 2**20:
        raise UserError(
            f"--scale {sizes!r}: expected FIRST..LAST, numbers of devices from 1 to {2**20:,}, as 64..16384"
        )
    while first <= last:
        yield first
        first *= 2


def print_scaling(found: Scaling, title: str) -> None:
    """A table of either kind for a person."""
    console = Console(width=None if Console().is_terminal else 190, highlight=False)
    weak, strong = _table(found.weak, "weak scaling"), _table(found.strong, "strong scaling")
    console.print(title, weak, strong, sep="\n", markup=False)
    failures = found.failures
    saves = "as long as its state to the host" if failures.save is None else f"{failures.save:,.0f} s"
    console.print(
        f"predicted, not measured; a device fails every {failures.mtbf / 3600:,.0f} hours, a restart takes "
        f"{failures.restart:,.0f} s, a checkpoint {saves}",
        markup=False,
        soft_wrap=True,
    )


_COLUMNS = (
    *("machine", "batch", "mesh", "ZeRO", "step s", "MFU", "bubble", "waits", "tokens/s", "a device", "fails every"),
    *("saves every", "goodput", "trained tokens/s"),
)


def _table(points: Sequence[Point], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("machine", "mesh") else "right")
    for point in points:
        table.add_row(*_row(point, _first(points)))
    return table


def _row(point: Point, first: Point | None) -> Iterator[str]:
    yield point.target.name
    yield f"{point.batch:g}"
    if point.plan is None:
        yield f"none: {point.why}"
        return
    seconds, layout = point.plan.seconds, point.plan.layout
    yield mesh_text(layout)
    yield str(layout.zero)
    yield f"{seconds.total:.3g}"
    yield f"{seconds.mfu:.1%}"
    yield f"{seconds.of(BUBBLE) / seconds.total:.1%}"
    yield f"{seconds.of(*COMMUNICATION) / seconds.total:.1%}"
    yield f"{point.tokens_per_second:,.0f}"
    yield f"{efficiency(point, first):.0%}"
    yield duration(point.between)
    yield duration(point.interval)
    yield f"{point.goodput:.1%}"
    yield f"{point.trained_per_second:,.0f}"


def _first(points: Sequence[Point]) -> Point | None:
    return next((one for one in points if one.plan), None)


def efficiency(point: Point, first: Point | None) -> float:
    """Tokens of a device in a second ÷ those on the smallest machine that there is a plan for."""
    if first is None:
        return 0.0
    return point.tokens_per_second / point.target.devices / (first.tokens_per_second / first.target.devices)


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def scaling_json(found: Scaling, config: Path) -> dict[str, Any]:
    """As plain dicts, lists, numbers and strings."""
    kinds = {"weak": found.weak, "strong": found.strong}
    points = {kind: [_json(one, _first(own)) for one in own] for kind, own in kinds.items()}
    return {"config": str(config), "failures": asdict(found.failures), **points}


def _json(point: Point, first: Point | None) -> dict[str, Any]:
    machine = {"target": point.target.name, "devices": point.target.devices, "batch": point.batch}
    failures = {"failure_every_s": point.between, "checkpoint_every_s": point.interval, "goodput": point.goodput}
    if point.plan is None:
        return {**machine, **failures, "why": point.why}
    rates = {"tokens_per_s": point.tokens_per_second, "trained_tokens_per_s": point.trained_per_second}
    return {**machine, **failures, **rates, "efficiency": efficiency(point, first), "plan": plan_json(point.plan)}
