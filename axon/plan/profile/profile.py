"""The device time of a training step, operation by operation: every moment is one's, or idle."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from axon.errors import UserError
from axon.plan.hlo import Module
from axon.plan.live import live_at_peak
from axon.plan.profile.roles import OTHER, UNNAMED, Role, Roles
from axon.plan.profile.shares import Interval, exclusive
from axon.plan.profile.trace import NANO, Event, read_trace

OTHER_PROGRAMS = "other programs"
"""In place of a module: of what runs meanwhile besides the step, as placing batches."""


@dataclass(frozen=True)
class Row:
    """What an operation took of a step, the mean over devices.

    Args:
        name: of the HLO instruction, or of the kernel where the trace has no other. seconds: in which nothing before it
            in rank ran, shared where several did: these add up. busy: from its beginnings to its ends. calls: a step.
    """

    name: str
    role: Role
    seconds: float
    busy: float
    calls: float


@dataclass(frozen=True)
class StepProfile:
    """A step of a program, as it was traced.

    Args:
        rows: the operations, the longest first. seconds: of a step, from the first operation of the traced steps to the
            end of the last, ÷ their number; `idle` are those in which a device does nothing. mesh: axis → size. host:
            what the loop around the steps does meanwhile, by `axon.train.loop.HOST_SPANS` → seconds of a step. held:
            module → bytes of its arrays when a device holds most: see `axon.plan.live`.
    """

    steps: int
    devices: int
    mesh: Mapping[str, int]
    rows: tuple[Row, ...]
    seconds: float
    idle: float
    host: Mapping[str, float]
    held: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path, text: str, steps: int, mesh: Mapping[str, int]) -> "StepProfile":
        """The profile in the latest trace below `folder` of `steps` steps of the program whose HLO is `text`.

        Raises `UserError` where there is none, or where nothing in it is of this program.
        """
        program = Module.of(text)
        trace = read_trace(folder)
        named = text.partition("HloModule ")[2].partition(",")[0].strip()
        roles = Roles(program)
        ran = [e for e in trace.events if e.program == named or (not e.program and roles.has(e.kernel, e.operation))]
        if not ran:
            raise UserError(f"the trace in {folder} has no operation of the program {named!r}, which was compiled here")
        begin, end = min(event.begin for event in ran), max(event.end for event in ran)
        within = [event for event in trace.events if event.begin < end and event.end > begin]
        by_device: dict[int, list[Event]] = defaultdict(list)
        for event in within:
            by_device[event.device].append(event)
        count = len(by_device)
        rows = _rows(by_device, roles, named, NANO / steps / count)
        total = (end - begin) * NANO / steps
        host = {name: seconds / steps for name, seconds in trace.host.items()}
        idle = total - sum(row.seconds for row in rows)
        return cls(steps, count, mesh, rows, total, idle, host, _bytes_at_peak(program, roles))

    def by(self, key: Callable[[Row], str]) -> dict[str, float]:
        """Seconds by what `key` says of each operation, the longest first."""
        found: dict[str, float] = defaultdict(float)
        for row in self.rows:
            found[key(row)] += row.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _bytes_at_peak(program: Module, roles: Roles) -> dict[str, int]:
    """Bytes of a device's arrays when it holds most, by module."""
    found: dict[str, int] = defaultdict(int)
    for name, size in live_at_peak(program).items():
        role = roles.of(name)
        found[role.module if role else UNNAMED] += size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _rows(by_device: Mapping[int, list[Event]], roles: Roles, named: str, scale: float) -> tuple[Row, ...]:
    """Rows of all devices' events; `scale`: seconds of a step and a device for each nanosecond."""
    sums: dict[tuple[str, Role], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for events in by_device.values():
        found = [_named(event, roles, named) for event in events]
        intervals: list[Interval] = [(e.begin, e.end, role.rank) for e, (_, role) in zip(events, found, strict=True)]
        for event, own, key in zip(events, exclusive(intervals), found, strict=True):
            ran = own * scale, (event.end - event.begin) * scale, scale / NANO
            sums[key] = [before + more for before, more in zip(sums[key], ran, strict=True)]
    return tuple(sorted((Row(*key, *ran) for key, ran in sums.items()), key=lambda row: -row.seconds))


def _named(event: Event, roles: Roles, named: str) -> tuple[str, Role]:
    """The name and the role of what ran."""
    if event.program not in (named, ""):
        return event.program, Role(OTHER_PROGRAMS, "", OTHER)
    return event.operation or event.kernel, roles.of_kernel(event.kernel, event.operation)
