"""`axon plan`: plans for the run that a file describes, as a table, as JSON and as a file to run."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from axon.axes import Execution
from axon.axes.execution import Remat, RematByKind
from axon.chips import chips
from axon.chips.target import Target
from axon.config import load
from axon.disk import output, writing
from axon.errors import UserError, suggest
from axon.layout import Layout, Placement
from axon.plan.predict.memory import GIB
from axon.plan.predict.seconds import BUBBLE, COMMUNICATION, Line
from axon.plan.predict.work import Work, policies_of
from axon.plan.search import Pins, Plan, Planner
from axon.plan.search.reasons import why_not
from axon.plan.search.refusals import refusal
from axon.plan.search.space import Space
from axon.run import Train, program

PLANNED = (
    "mesh",
    "rows",
    "params",
    "zero",
    "microbatches",
    "schedule",
    "pad_layers",
    "overlap",
    "replicate_kv",
    "context",
)
"""The fields of a layout that a plan says; the others are the config's."""


@dataclass(frozen=True)
class Plans:
    """The best plans of a search, the fastest first.

    `tried`: how many fit, by prediction. `took`: seconds of the search.
    """

    target: Target
    config: Path
    plans: tuple[Plan, ...]
    tried: int
    took: float

    def json(self) -> dict[str, Any]:
        """As plain dicts, lists, numbers and strings."""
        target = {"target": self.target.name, "devices": self.target.devices, "config": str(self.config)}
        return {**target, "fitting": self.tried, "search_s": self.took, "plans": [_json(one) for one in self.plans]}


def plan_config(path: Path, on: str, overrides: Sequence[str], pins: Sequence[str], count: int) -> Plans:
    """The best plans for the training run of the file at `path` on the machine `on`.

    Args:
        overrides: bound last, as `Data.batch=512`. pins: the same of `Layout` and `Execution`, which all plans have.

    Raises `ConfigError` and `UserError` for what a person has to change: a target that there is not, a model that fits
    nowhere, a batch that nothing divides, pins that leave nothing.
    """
    begun = time.perf_counter()
    target = Target.of(on, dict(chips()))
    tree: Train = load(path, [*overrides, *pins]).tree
    pinned = _pins(tree, pins)
    planner = _planner(tree, target, pinned)
    found = planner.best(count)
    if not found:
        raise refusal(planner)
    best, *others = found
    plans = (best, *(replace(one, why_not=why_not(one, best)) for one in others))
    return Plans(target, path, plans, len(planner.ranked), time.perf_counter() - begun)


def _planner(tree: Train, target: Target, pins: Pins) -> Planner:
    others = {field.name: value for field, value in _values(tree.layout) if field.name not in PLANNED}
    start = Layout(mesh={"data": 1}, **others).with_axes_of(tree.layout)
    base = program(replace(tree, layout=start), Placement.described(start, 1, target.platform))
    policies = [_policy(tree.execution.remat)] if "remat" in pins.execution else policies_of(base)
    work = Work.of(base, dict.fromkeys(["none", "full", *policies]))
    space = Space(base, target, start, tree.execution, tuple(policies), pins)

    def validate(layout: Layout, execution: Execution) -> None:
        placement = Placement.described(layout, target.devices, target.platform)
        program(replace(tree, layout=layout, execution=execution), placement)

    return Planner(space, work, validate)


def _policy(remat: RematByKind) -> Remat:
    """A pinned policy. Raises `UserError` for one by name of activation or by kind of block, which is not predicted."""
    if not isinstance(remat, str | tuple):
        raise UserError(
            f"--pin Execution.remat = {remat!r}: a plan has one policy for all kinds of block, by its name or as a "
            "tuple of what is kept. Write it so, or leave the pin out"
        )
    return remat


def _pins(tree: Train, pins: Sequence[str]) -> Pins:
    """The pinned fields, as the tree has them. Raises `UserError` for another part's."""
    own: dict[str, dict[str, Any]] = {"Layout": {}, "Execution": {}}
    parts = {"Layout": tree.layout, "Execution": tree.execution}
    for pin in pins:
        part, _, name = pin.partition("=")[0].strip().rpartition(".")
        if part not in own:
            raise UserError(
                f"--pin {pin}: a plan is a Layout and an Execution.{suggest(part, own)} What else is to change is "
                "given by --set"
            )
        own[part][name] = {field.name: value for field, value in _values(parts[part])}[name]
    return Pins(own["Layout"], own["Execution"])


def _values(part: Any) -> Iterator[tuple[Any, Any]]:
    return ((field, vars(part)[field.name]) for field in fields(part))


# ---- for a person ----------------------------------------------------------------------------------------------------


def print_plans(found: Plans) -> None:
    """A table of the plans, what the best one's memory and step are made of, and why the others lost."""
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    table = _table(f"{found.config} on {found.target.name}, {found.target.devices} devices", "plan", *_HEADINGS)
    for number, plan in enumerate(found.plans, 1):
        table.add_row(str(number), *_row(plan))
    best = found.plans[0]
    console.print(table, _memory(best), _step(best), sep="\n")
    lines = [f"plan {number}: {plan.why_not}" for number, plan in enumerate(found.plans[1:], 2)]
    lines.append(f"predicted, not measured; {found.tried:,} fit, found in {found.took:.1f} s")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


_HEADINGS = ("mesh", "ZeRO", "microbatches", "schedule", "remat", "GiB", "step s", "MFU", "bubble", "waits")


def _row(plan: Plan) -> Iterator[str]:
    layout, total = plan.layout, plan.seconds.total
    yield " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items()) + (
        ", seq" if _splits_stream(layout) else ""
    )
    yield str(layout.zero)
    yield str(layout.microbatches)
    yield "–" if layout.schedule is None else repr(layout.schedule).removesuffix("()")
    yield _remat(plan.execution.remat)
    yield f"{plan.memory.gib:.1f}"
    yield f"{total:.3g}"
    yield f"{plan.seconds.mfu:.1%}"
    yield f"{plan.seconds.of(BUBBLE) / total:.1%}"
    yield f"{plan.seconds.of(*COMMUNICATION) / total:.1%}"


def _splits_stream(layout: Layout) -> bool:
    return "seq.residual" in layout.rows


def _remat(remat: Any) -> str:
    return remat if isinstance(remat, str) else f"keeps {', '.join(remat)}"


def _memory(plan: Plan) -> Table:
    table = _table("memory of a device of plan 1", "part", "GiB")
    for name, size in plan.memory.parts.items():
        table.add_row(name, f"{size / GIB:.2f}")
    table.add_row("total", f"{plan.memory.gib:.2f}")
    return table


def _step(plan: Plan) -> Table:
    table = _table("a step of plan 1", "part", "mesh axes", "seconds", "meanwhile work runs", "longer by", "share")
    for line in sorted(plan.seconds.lines, key=lambda line: -line.exposed):
        table.add_row(*_cells(line, plan.seconds.total))
    return table


def _cells(line: Line, total: float) -> Iterator[str]:
    yield line.name
    yield " ".join(line.mesh_axes) or "–"
    yield f"{line.seconds:.3f}"
    yield f"{line.hidden:.3f}" if line.hidden else "–"
    yield f"{line.exposed:.3f}"
    yield f"{line.exposed / total:.1%}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for number, heading in enumerate(headings):
        table.add_column(
            heading, justify="left" if number == 0 or heading in ("mesh", "mesh axes", "remat") else "right"
        )
    return table


# ---- for programs ----------------------------------------------------------------------------------------------------


def _json(plan: Plan) -> dict[str, Any]:
    lines = [
        {"name": line.name, "mesh_axes": list(line.mesh_axes), "seconds": line.seconds, "exposed": line.exposed}
        for line in plan.seconds.lines
    ]
    return {
        "layout": {name: _plain(value) for name, value in _planned(plan.layout).items()},
        "execution": {"remat": _plain(plan.execution.remat)},
        "memory_gib": round(plan.memory.gib, 3),
        "memory": {name: round(size / GIB, 3) for name, size in plan.memory.parts.items()},
        "step_s": plan.seconds.total,
        "mfu": plan.seconds.mfu,
        "bubble_s": plan.seconds.of(BUBBLE),
        "exposed_communication_s": plan.seconds.of(*COMMUNICATION),
        "lines": lines,
        **({"why_not": plan.why_not} if plan.why_not else {}),
    }


def _planned(layout: Layout) -> dict[str, Any]:
    return {name: vars(layout)[name] for name in PLANNED}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, str | int | float | None) else repr(value)


def write_plan(found: Plans, config: Path, overrides: Sequence[str], path: Path) -> None:
    """Write the best plan as a config that includes `config`, so that `axon train` and `axon compile` take it.

    Raises `UserError` for a file that is no `.gin`, or cannot be written.
    """
    path, best = output(path, "--write", ".gin"), found.plans[0]
    text = "\n".join([*_gin(found, best, config, overrides), ""])
    with writing(path):
        path.write_text(text)


def _gin(found: Plans, best: Plan, config: Path, overrides: Sequence[str]) -> Iterator[str]:
    yield f"# Planned for {found.target.name} (axon plan). Predicted: {best.memory.gib:.1f} GiB of a device,"
    yield f"# {best.seconds.total:.3g} s a step, MFU {best.seconds.mfu:.1%}."
    yield ""
    yield f"include {str(config.resolve())!r}"
    yield ""
    yield from (change.replace("=", " = ", 1) for change in overrides)
    schedule = best.layout.schedule
    for name, value in _planned(best.layout).items():
        yield f"Layout.{name} = " + (
            f"@{type(schedule).__name__}()" if name == "schedule" and schedule else repr(value)
        )
    if schedule is not None:
        yield from (f"{type(schedule).__name__}.{field.name} = {value!r}" for field, value in _values(schedule))
    yield f"Execution.remat = {best.execution.remat!r}"
