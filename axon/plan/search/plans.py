"""Plans: layouts and executions that fit a machine and that validation accepts, the fastest first."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from axon.axes import Execution
from axon.chips.target import Target
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.memory import Memory, away, kept, memory
from axon.plan.predict.seconds import Seconds, seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work
from axon.plan.report import Report
from axon.plan.search.space import Space

ROOM = 0.9
"""How much of a device's memory a plan may take by prediction, which is right within about 10 %."""


@dataclass(frozen=True)
class Plan:
    """A layout and an execution, and what is predicted of a step with them.

    `why_not`: why it is not the best. `compiled`: what the compiler reports of it, where it was asked.
    """

    layout: Layout
    execution: Execution
    memory: Memory
    seconds: Seconds
    why_not: str = ""
    compiled: Report | None = None


Acceptance = Callable[[Plan], Plan | None]
"""A plan as it is taken, once the program that would run is built; None for one that is refused."""


@dataclass(frozen=True)
class Planner:
    """The search of `space`, whose step is `work`; each plan is what `accept` makes of it.

    `bandwidths`: of the target's links, by default those of the table of chips.
    """

    space: Space
    work: Work
    accept: Acceptance
    bandwidths: Bandwidths | None = None

    @property
    def target(self) -> Target:
        return self.space.target

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may take."""
        return ROOM * self.target.chip.memory

    def best(self, count: int) -> list[Plan]:
        """The fastest plans that are accepted, of each mesh, ZeRO stage and schedule the fastest one."""
        found, seen = [], set()
        for plan in self.ranked:
            kind = tuple(plan.layout.mesh.items()), plan.layout.zero, repr(plan.layout.schedule)
            if kind not in seen and (accepted := self.accept(plan)):
                seen.add(kind)
                found.append(accepted)
            if len(found) == count:
                break
        return found

    @cached_property
    def ranked(self) -> list[Plan]:
        """All that fits, the fastest first; of two as fast the one with less memory."""
        return sorted(self.fitting(), key=lambda plan: (plan.seconds.total, plan.memory.total))

    def fitting(self) -> Iterator[Plan]:
        """All that fits, by prediction."""
        for layout in self.space.layouts():
            split = self.split(layout)
            if not split.divides or split.gradients + self._here(split.state) > self.room:
                continue
            for run in self.space.runs(layout):
                for execution in self.space.executions():
                    shards = Shards(split, run, execution)
                    if sum(kept(shards).values()) > self.room:
                        break  # whatever remat keeps
                    used = memory(shards)
                    if used.total <= self.room:
                        yield Plan(run, execution, used, seconds(shards, self.target, self.bandwidths))

    def _here(self, state: Mapping[str, float]) -> float:
        """Bytes of the state that lie on a device."""
        return sum(size for kind, size in state.items() if kind not in away(self.space.execution))

    def smallest(self) -> Plan:
        """What would take least memory, whether it fits or not. Raises `UserError` where nothing divides."""
        found = None
        for layout in self.space.layouts():
            split = self.split(layout)
            for run in self.space.runs(layout) if split.divides else ():
                shards = Shards(split, run, replace(self.space.execution, remat="full"))
                used = memory(shards)
                if found is None or used.total < found.memory.total:
                    found = Plan(run, shards.execution, used, seconds(shards, self.target, self.bandwidths))
        if found is None:
            raise UserError(f"no layout divides {self.target.devices} devices so")
        return found

    def split(self, layout: Layout) -> Split:
        """The work under a layout's rows."""
        return Split(self.work, Placement.described(layout, self.target.devices, self.target.platform))
