"""`axon plan`: plans as a table, as JSON and as a file to run."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from axon.disk import output, writing
from axon.layout import Layout
from axon.layout.table import DEFAULT_ROWS
from axon.plan.predict.memory import GIB
from axon.plan.predict.seconds import BUBBLE, COMMUNICATION, Line
from axon.plan.search import Plan
from axon.run import Planned
from axon.run.planned import model_sizes
from axon.show.compile import collectives_table
from axon.show.plan_why import why
from axon.show.planning import PLANNED, Plans, own_values

# ---- for a person ----------------------------------------------------------------------------------------------------


def print_plans(found: Plans) -> None:
    """A table of the plans, what the best one's memory and step are made of, and why the others lost."""
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    formats = ("format",) * bool(found.question.formats)
    title = f"{found.question.config} on {found.target.name}, {found.target.devices} devices"
    table = empty_table(title, "plan", *formats, *_HEADINGS)
    for number, plan in enumerate(found.plans, 1):
        table.add_row(str(number), *(recipe_name(plan) for _ in formats), *_row(plan))
    best, *others = found.plans
    console.print(table, _memory(found), _step(best), sep="\n")
    if best.compiled:
        console.print(
            _compiled(found), collectives_table(best.compiled, "collectives of plan 1, as compiled"), sep="\n"
        )
    lines = [*why(best, found.target), *(f"plan {number}: {one.why_not}" for number, one in enumerate(others, 2))]
    lines += [f"dropped: {one.reason}; {one.plan.memory.gib:.1f} GiB were predicted" for one in found.dropped]
    lines += [f"links as measured: {found.question.links}"] * (found.question.links is not None)
    lines.append(f"predicted, not measured; {found.tried:,} fit, found in {found.took:.1f} s")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


_HEADINGS = ("mesh", "ZeRO", "microbatches", "schedule", "remat", "GiB", "step s", "MFU", "bubble", "waits")


def _row(plan: Plan) -> Iterator[str]:
    layout, total = plan.layout, plan.seconds.total
    yield mesh_text(layout)
    yield str(layout.zero)
    yield str(layout.microbatches)
    yield "–" if layout.schedule is None else repr(layout.schedule).removesuffix("()")
    yield plan.carried_out
    yield f"{plan.memory.gib:.1f}"
    yield f"{total:.3g}"
    yield f"{plan.seconds.mfu:.1%}"
    yield f"{plan.seconds.of(BUBBLE) / total:.1%}"
    yield f"{plan.seconds.of(*COMMUNICATION) / total:.1%}"


def recipe_name(plan: Plan) -> str:
    """The recipe of a plan's products, as `--format` names it."""
    return "none" if plan.recipe is None else type(plan.recipe).__name__


def mesh_text(layout: Layout) -> str:
    """The mesh of a plan, `seq` where sequence parallelism splits the stream, and rows that are not the default's."""
    whole = [name for name, row in layout.rows.items() if row is None and "tensor" in DEFAULT_ROWS.get(name, ())]
    parts = [" × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())]
    parts += ["seq"] if "seq.residual" in layout.rows else []
    parts += [f"{name} split" for name, row in layout.rows.items() if row == "tensor"]
    return ", ".join([*parts, *(f"{name} whole" for name in whole)])


def _memory(found: Plans) -> Table:
    """The parts of each plan's memory, on each of its stages, which all run one program; *slack* is what is left."""
    numbers = (f"plan {number}" for number, _ in enumerate(found.plans, 1))
    table = empty_table("memory of a device, GiB", "part", *numbers)
    for name in dict.fromkeys(name for plan in found.plans for name in plan.memory.parts):
        table.add_row(name, *(f"{plan.memory.parts.get(name, 0.0) / GIB:.2f}" for plan in found.plans))
    table.add_row("total", *(f"{plan.memory.gib:.2f}" for plan in found.plans))
    table.add_row("slack", *(f"{(found.target.chip.memory - plan.memory.total) / GIB:.2f}" for plan in found.plans))
    return table


def _compiled(found: Plans) -> Table:
    """What the compiler says of each plan, beside what was predicted."""
    headings = ("plan", "GiB predicted", "GiB", "error", "step s", "Mcycles", "GB sent", "asynchronous")
    table = empty_table("as compiled", *headings)
    for number, plan in enumerate(found.plans, 1):
        if report := plan.compiled:
            sent, total = sum(one.sent for one in report.collectives), report.memory["total"]
            cycles = sum(report.cycles.values()) + sum(report.kernel_cycles.values())
            table.add_row(
                *(str(number), f"{plan.memory.gib:.2f}", f"{total / GIB:.2f}", f"{plan.memory.total / total - 1:+.0%}"),
                *(f"{plan.seconds.total:.3g}", f"{cycles / 1e6:,.0f}" if cycles else "–"),
                *(f"{sent / 1e9:.2f}", f"{report.asynchronous:.0%}"),
            )
    return table


def _step(plan: Plan) -> Table:
    table = empty_table(
        "a step of plan 1", "part", "mesh axes", "GB", "by", "seconds", "latency", "hidden", "longer by", "share"
    )
    for line in sorted(plan.seconds.lines, key=lambda line: -line.exposed):
        table.add_row(*_cells(line, plan.seconds.total))
    return table


def _cells(line: Line, total: float) -> Iterator[str]:
    yield line.name
    yield " ".join(line.mesh_axes) or "–"
    yield f"{line.bytes / 1e9:.3g}" if line.bytes else "–"
    yield line.algorithm or "–"
    yield f"{line.seconds:.3f}"
    yield f"{line.latency / line.seconds:.0%}" if line.latency else "–"
    yield f"{min(line.hidden, line.seconds):.3f}" if line.hidden else "–"
    yield f"{line.exposed:.3f}"
    yield f"{line.exposed / total:.1%}"


_WORDS = ("format", "mesh", "mesh axes", "by", "remat")
"""Headings of columns of words."""


def empty_table(title: str, *headings: str) -> Table:
    """A table without rows, whose columns but words are aligned at their ends."""
    table = Table(title=title, title_justify="left", box=None)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 or heading in _WORDS else "right")
    return table


# ---- for programs ----------------------------------------------------------------------------------------------------


def plans_json(found: Plans) -> dict[str, Any]:
    """As plain dicts, lists, numbers and strings."""
    target = {"target": found.target.name, "devices": found.target.devices, "config": str(found.question.config)}
    dropped = [{**plan_json(one.plan), "reason": one.reason, "needed": one.needed} for one in found.dropped]
    plans = {"plans": [plan_json(one) for one in found.plans], "dropped": dropped}
    return {
        **target,
        "why": [*why(found.plans[0], found.target)],
        "fitting": found.tried,
        "search_s": found.took,
        **plans,
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """One plan, likewise."""
    lines = [
        {name: _plain(value) for name, value in vars(line).items()} | {"exposed": line.exposed}
        for line in plan.seconds.lines
    ]
    return {
        "layout": {name: _plain(value) for name, value in _planned(plan.layout).items()},
        "execution": {"remat": _plain(plan.execution.remat), "host": list(plan.execution.host)},
        "recipe": plan.recipe and recipe_name(plan),
        "memory_gib": round(plan.memory.gib, 3),
        "memory": {name: round(size / GIB, 3) for name, size in plan.memory.parts.items()},
        "step_s": plan.seconds.total,
        "mfu": plan.seconds.mfu,
        "bubble_s": plan.seconds.of(BUBBLE),
        "exposed_communication_s": plan.seconds.of(*COMMUNICATION),
        "lines": lines,
        **({"why_not": plan.why_not} if plan.why_not else {}),
        **({"compiled": plan.compiled.json()} if plan.compiled else {}),
    }


def _planned(layout: Layout) -> dict[str, Any]:
    return {name: vars(layout)[name] for name in PLANNED}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, str | int | float | None) else repr(value)


def write_plan(found: Plans, path: Path) -> None:
    """Write the best plan as a file that `--plan` lays over the run's config: its layout and execution, and what it is
    for (`axon.run.Planned`).

    Raises `UserError` for a file that is no `.gin`, or cannot be written.
    """
    best, run = found.plans[0], found.run
    own = f"{best.memory.gib:.1f} GiB of a device, {best.seconds.total:.3g} s a step, MFU {best.seconds.mfu:.1%}"
    sizes = {**model_sizes(run.model), "Data.batch": run.data.batch, "Data.seq": run.seq}
    write_planned("Train", Planned(found.target.name, found.target.devices, sizes), own, _gin(found, best), path)


def write_planned(root: str, planned: Planned, predicted: str, lines: Iterable[str], path: Path) -> None:
    """Write these `lines` below what they are for, as a field of the tree's `root`, and what is predicted of them.
    Raises as `write_plan`."""
    path = output(path, "--write", ".gin")
    head = f"# A plan, to be laid over a config (--plan). Predicted on {planned.target}:", f"# {predicted}.", ""
    fields = (f"Planned.{field.name} = {value!r}" for field, value in own_values(planned))
    text = "\n".join([*head, f"{root}.plan = @Planned()", *fields, "", *lines, ""])
    with writing(path):
        path.write_text(text)


def _gin(found: Plans, best: Plan) -> Iterator[str]:
    if found.question.formats:
        yield f"Precision.recipe = {best.recipe and f'@{recipe_name(best)}()'}"
    schedule = best.layout.schedule
    for name, value in _planned(best.layout).items():
        yield f"Layout.{name} = " + (
            f"@{type(schedule).__name__}()" if name == "schedule" and schedule else repr(value)
        )
    if schedule is not None:
        yield from (f"{type(schedule).__name__}.{field.name} = {value!r}" for field, value in own_values(schedule))
    yield f"Execution.remat = {best.execution.remat!r}"
    yield f"Execution.host = {best.execution.host!r}"
