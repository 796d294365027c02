"""Plans over sizes of a machine: weak scaling, whose batch grows with it, and strong scaling, whose batch stays."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from axon.chips.target import Target
from axon.plan.predict.failures import Failures
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.memory import GIB
from axon.plan.search.plans import Plan, Planner

KEPT = ("parameters", "optimizer", "variables")
"""Parts of a plan's memory that a checkpoint has."""


@dataclass(frozen=True)
class Point:
    """The best plan on a machine.

    Args:
        tokens: of a step. goodput: the expected share of the time that trains, with a checkpoint after each `interval`
            seconds of training; between: mean seconds between the machine's failures. why: where there is no plan.
    """

    target: Target
    batch: float
    tokens: float
    plan: Plan | None
    why: str
    goodput: float
    interval: float
    between: float

    @property
    def tokens_per_second(self) -> float:
        """Of the whole machine while it trains; 0 without a plan."""
        return self.tokens / self.plan.seconds.total if self.plan else 0.0

    @property
    def trained_per_second(self) -> float:
        """The same in the long run, failures and checkpoints included."""
        return self.tokens_per_second * self.goodput


@dataclass(frozen=True)
class Scaling:
    """Points of growing machines with `failures`: with as many sequences on each device, and with as many in all."""

    weak: tuple[Point, ...]
    strong: tuple[Point, ...]
    failures: Failures


def scaling(
    planner: Planner,
    machines: Sequence[Target],
    failures: Failures,
    resized: Callable[[Target, int], Planner],
    say: Callable[[str], None],
) -> Scaling:
    """The best plans on `machines`.

    Args:
        planner: of the run as it is configured, whose sequences on each device of its target weak scaling keeps.
            resized: the same search for another machine and batch. say: told of each plan, in a line.
    """
    batch, count = planner.space.program.batch, planner.target.devices
    known: dict[tuple[str, float], Point] = {}

    def points(grows: bool) -> Iterator[Point]:
        for target in machines:
            own = batch * target.devices / count if grows else float(batch)
            key = target.name, own
            if key not in known:
                known[key] = _point(target, own, planner.space.program.seq, failures, resized)
                say(f"{target.name}, {own:g} sequences: {_described(known[key])}")
            yield known[key]

    return Scaling(tuple(points(grows=True)), tuple(points(grows=False)), failures)


def _point(
    target: Target, batch: float, seq: int, failures: Failures, resized: Callable[[Target, int], Planner]
) -> Point:
    plan, why = _best(resized(target, int(batch))) if batch.is_integer() else (None, "no whole number of sequences")
    count, failures = target.devices, failures.of_state(_saving(plan, target)) if plan else failures
    shares = failures.goodput(count), failures.interval(count), failures.between(count)
    return Point(target, batch, batch * seq, plan, why, *shares)


def _saving(plan: Plan, target: Target) -> float:
    """Seconds in which a device's state is copied to its host."""
    return sum(plan.memory.parts.get(kind, 0.0) for kind in KEPT) / Bandwidths.of(target).host


def _best(planner: Planner) -> tuple[Plan | None, str]:
    """The best plan, or else why there is none."""
    found = planner.best(1)
    if found:
        return found[0], ""
    if planner.ranked:
        return None, "the program refuses all that fit"
    if (least := planner.smallest()) is None:
        return None, "no layout divides batch and widths so, with the pins"
    return None, f"takes {least.memory.gib:.1f} GiB of a device at least, of {planner.room / GIB:.1f}"


def _described(point: Point) -> str:
    return f"{point.plan.seconds.total:.3g} s a step" if point.plan else point.why
