"""A traced step for a person: tables of text, which a terminal and a page show."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from axon.plan.profile import roles
from axon.plan.profile.beside import Comparison, line_of
from axon.plan.profile.profile import Row, StepProfile

PHASES = ("forward", "recomputed", "backward", "")
LONGEST = 12
"""Rows of the table of single operations."""


class Table(NamedTuple):
    """The first column is text, the others are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(
    profile: StepProfile, lines: list[Comparison], flops: Mapping[str, float], memory: Mapping[str, float]
) -> list[Table]:
    """All tables of a step.

    Args:
        lines: the step beside its prediction. flops: of a device by module. memory: bytes of a device by what they are.
    """
    found = [
        _lines(profile, lines),
        _modules(profile, flops),
        _kinds(profile),
        _collectives(profile),
        _longest(profile),
        _host(profile),
        _sizes("memory of a device, as compiled", memory),
        _sizes("of its temporaries, those that are there at the peak, by module", profile.held),
    ]
    return [table for table in found if table.rows]


def _lines(profile: StepProfile, lines: list[Comparison]) -> Table:
    title = f"a step, {_ms(profile.seconds)} ms: the mean of {profile.steps} steps and {profile.devices} devices"
    predicted = [one.predicted for one in lines if one.predicted is not None]
    rows = [(one.name, _ms(one.measured), _share(one.measured, profile), _ms(one.predicted)) for one in lines]
    rows.append(("all", _ms(profile.seconds), "100.0%", _ms(sum(predicted) if predicted else None)))
    return Table(title, ("line", "ms", "share", "predicted ms"), rows)


def _modules(profile: StepProfile, flops: Mapping[str, float]) -> Table:
    """By module and phase, without what is sent; the rate is that of its products."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    products: dict[str, float] = defaultdict(float)
    for row in profile.rows:
        if row.role.kind != roles.COLLECTIVES:
            seconds[row.role.module][row.role.phase] += row.seconds
        if row.role.kind == roles.PRODUCTS or row.role.kind.startswith(roles.KERNEL):
            products[row.role.module] += row.seconds
    rows = []
    for module, phases in sorted(seconds.items(), key=lambda item: -sum(item[1].values())):
        total, rate = sum(phases.values()), products[module] and flops.get(module, 0.0) / products[module]
        cells = (_ms(phases.get(phase)) for phase in PHASES)
        rows.append((module, *cells, _ms(total), _share(total, profile), f"{rate / 1e12:.3g}" if rate else "–"))
    headings = ("module", "forward", "again", "backward", "outside", "all, ms", "share", "TFLOP/s of products")
    return Table("work by module, ms", headings, rows)


def _kinds(profile: StepProfile) -> Table:
    return _grouped(profile, "by kind of operation", lambda row: row.role.kind)


def _collectives(profile: StepProfile) -> Table:
    """By kind and mesh axes: seconds from beginning to end, and those in which no other work runs."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in profile.rows:
        if row.role.kind == roles.COLLECTIVES:
            kind = row.role.collective.kind if row.role.collective else row.name
            groups[f"{kind}, {line_of(row, profile)}"].append(row)
    rows = [_sent(name, group, profile) for name, group in groups.items()]
    headings = ("collectives", "times", "MB sent", "ms", "alone, ms", "share", "GB/s")
    return Table("what is sent", headings, rows)


def _sent(name: str, group: list[Row], profile: StepProfile) -> tuple[str, ...]:
    begun = [row for row in group if "-done" not in row.name]
    size = sum(row.calls * row.role.collective.sent for row in begun if row.role.collective)
    busy, alone = sum(row.busy for row in group), sum(row.seconds for row in group)
    rate = f"{size / busy / 1e9:.3g}" if size and busy else "–"
    times = sum(row.calls for row in begun)
    return name, f"{times:.0f}", f"{size / 1e6:,.3f}", _ms(busy), _ms(alone), _share(alone, profile), rate


def _longest(profile: StepProfile) -> Table:
    rows = [
        (row.name, " ".join((row.role.module, row.role.phase)).strip(), row.role.kind, _ms(row.seconds))
        for row in profile.rows[:LONGEST]
    ]
    return Table("the longest operations", ("operation", "module", "kind", "ms"), rows)


def _host(profile: StepProfile) -> Table:
    rows = [(name, _ms(seconds), _share(seconds, profile)) for name, seconds in profile.host.items()]
    return Table("the host meanwhile", ("", "ms", "share"), rows)


def _sizes(title: str, sizes: Mapping[str, float]) -> Table:
    return Table(title, ("", "MiB"), [(name, f"{size / 2**20:,.2f}") for name, size in sizes.items() if size])


def _grouped(profile: StepProfile, title: str, key: Callable[[Row], str]) -> Table:
    calls: dict[str, float] = defaultdict(float)
    for row in profile.rows:
        calls[key(row)] += row.calls
    rows = [(name, f"{calls[name]:.0f}", _ms(own), _share(own, profile)) for name, own in profile.by(key).items()]
    return Table(title, ("kind", "times", "ms", "share"), rows)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.3f}"


def _share(seconds: float | None, profile: StepProfile) -> str:
    return "–" if seconds is None else f"{seconds / profile.seconds:.1%}"


def json_of(profile: StepProfile, lines: list[Comparison]) -> dict[str, object]:
    """The same for programs: seconds of a step, the mean over devices; operations that add up with `idle_s`."""
    return {
        "steps": profile.steps,
        "devices": profile.devices,
        "step_s": profile.seconds,
        "idle_s": profile.idle,
        "host_s": dict(profile.host),
        "held_bytes": dict(profile.held),
        "lines": [{"name": one.name, "measured_s": one.measured, "predicted_s": one.predicted} for one in lines],
        "operations": list(_operations(profile)),
    }


def _operations(profile: StepProfile) -> Iterator[dict[str, object]]:
    for row in profile.rows:
        sent = row.role.collective
        yield {
            "name": row.name,
            "module": row.role.module,
            "phase": row.role.phase,
            "kind": row.role.kind,
            **({"collective": sent.kind, "mesh_axes": list(sent.mesh_axes(profile.mesh))} if sent else {}),
            "seconds": row.seconds,
            "busy_s": row.busy,
            "calls": row.calls,
        }
