"""Where the time of a run went, by its events and metrics: the share of it that trained is its goodput."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from axon.observe.lines import Record

PARTS = {
    "productive": "steps that count",
    "compile": "compiling the step",
    "data": "waiting for batches",
    "evaluation": "loss on held-out data",
    "checkpoint": "training waited for a save",
    "repeated": "steps done again after a restart or rollback, or skipped",
    "down": "between the end of one process and the start of the next",
    "other": "restoring, sampling, drawing, and what is not measured",
}
"""Part of the time → what it is."""

OUTSIDE = ("restart", "give_up")
"""Events between processes."""


@dataclass(frozen=True)
class Goodput:
    """Seconds from the first start to the last event, and how many of them each of `PARTS` took; how many starts.

    The time between a process that was done, as with `--steps`, and the next start is not counted.
    """

    total: float
    seconds: dict[str, float]
    starts: int

    @property
    def share(self) -> float:
        """The productive share of the time, a fraction of 1."""
        return self.seconds["productive"] / self.total if self.total > 0 else 0.0

    @property
    def lost(self) -> float:
        """Seconds of repeated steps, and down."""
        return self.seconds["repeated"] + self.seconds["down"]


def goodput(events: Sequence[Record], metrics: Sequence[Record]) -> Goodput:
    """Where the time of a run went. A run without events has none.

    Seconds of steps are those of `metrics`; of steps that were done again those that the events of the later start
    say. Where a process was killed, the time between its last step and the next start is down time.
    """
    calls = _calls(events)
    if not calls:
        return Goodput(0.0, dict.fromkeys(PARTS, 0.0), 0)
    steps = [record for record in metrics if record.get("step_seconds") is not None]
    skipped = sum(record["step_seconds"] for record in steps if record.get("skipped"))
    data = _sum(events, "steps", "data_seconds")
    repeated = sum(_sum(events, kind, "lost_seconds") for kind in ("resume", "rollback"))
    found = {
        "productive": max(0.0, sum(record["step_seconds"] for record in steps) - skipped - data),
        "compile": _sum(events, "compile_end"),
        "data": data,
        "evaluation": _sum(events, "evaluation"),
        "checkpoint": _sum(events, "save_blocked"),
        "repeated": repeated + skipped,
        "down": sum(_down(one, other) for one, other in pairwise(calls)),
    }
    rests = sum(other[0]["time"] - one[-1]["time"] for one, other in pairwise(calls) if _done(one))
    total = max(0.0, calls[-1][-1]["time"] - calls[0][0]["time"] - rests)
    return Goodput(total, found | {"other": max(0.0, total - sum(found.values()))}, len(calls))


def _calls(events: Sequence[Record]) -> list[list[Record]]:
    """The events of each process, in order."""
    calls: list[list[Record]] = []
    for event in events:
        if event.get("kind") == "start":
            calls.append([])
        if calls and event.get("kind") not in OUTSIDE:
            calls[-1].append(event)
    return calls


def _sum(events: Sequence[Record], kind: str, name: str = "seconds") -> float:
    return sum(event.get(name) or 0.0 for event in events if event.get("kind") == kind)


def _done(call: Sequence[Record]) -> bool:
    return call[-1].get("outcome") == "done"


def _down(before: Sequence[Record], after: Sequence[Record]) -> float:
    """Seconds between two processes, without those of steps that the first did after its last event."""
    if _done(before):
        return 0.0
    gap = after[0]["time"] - before[-1]["time"]
    resumed = next((event for event in after if event["kind"] == "resume"), {})
    lost = resumed.get("lost_steps") or 0
    known = max((event.get("step") or 0 for event in before if event["kind"] == "steps"), default=0)
    unseen = min(lost, max(0, (resumed.get("step") or 0) + lost - known))
    return max(0.0, gap - ((resumed.get("lost_seconds") or 0.0) * unseen / lost if lost else 0.0))
