"""Plans: layouts and executions that fit a machine and that validation accepts, the fastest first."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from axon.axes import Execution
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.nn.remat import describe
from axon.plan.predict.explained import explained
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.memory import Memory, away, kept, memory, on_host
from axon.plan.predict.seconds import Seconds, seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work
from axon.plan.report import Report
from axon.plan.search.keeping import Keeping
from axon.plan.search.space import Space
from axon.precision import Recipe

ROOM = 0.9
"""How much of a device's memory a plan may take by prediction, which is right within about 10 %."""

HOST_ROOM = 0.7
"""How much of the host's memory, likewise: processes, batches and what is saved are there too."""


@dataclass(frozen=True)
class Plan:
    """A layout and an execution, and what is predicted of a step with them.

    `recipe`: the formats of its products; None: those of `Precision.compute`. `why_not`: why it is not the best.
    `compiled`: what the compiler reports of it, where it was asked.
    """

    layout: Layout
    execution: Execution
    memory: Memory
    seconds: Seconds
    recipe: Recipe | None = None
    why_not: str = ""
    compiled: Report | None = None

    @property
    def carried_out(self) -> str:
        """The plan's remat, and what of the state is on the host, in words."""
        remat: Any = self.execution.remat
        words = f"keeps {', '.join(remat)}" if isinstance(remat, tuple) else describe(remat)
        return f"{words}; {', '.join(self.execution.host)} on the host" if self.execution.host else words


Acceptance = Callable[[Plan], Plan | None]
"""A plan as it is taken, once the program that would run is built; None for one that is refused."""


@dataclass(frozen=True)
class Planner:
    """The search of `space`, whose step is `work`; each plan is what `accept` makes of it.

    `bandwidths`: of the target's links, by default those of the table of chips. `saved_every`: steps between
    checkpoints.
    """

    space: Space
    work: Work
    accept: Acceptance
    bandwidths: Bandwidths | None = None
    saved_every: int | None = None

    @property
    def target(self) -> Target:
        return self.space.target

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may take."""
        return ROOM * self.target.chip.memory

    @property
    def host_room(self) -> float:
        """Bytes of the host's memory that a device's part of a plan may take."""
        return HOST_ROOM * (self.target.chip.host_memory or math.inf)

    def best(self, count: int) -> list[Plan]:
        """The fastest plans that are accepted, of each mesh, ZeRO stage and schedule the fastest one."""
        return best_of((self,), count)

    @cached_property
    def ranked(self) -> list[Plan]:
        """All that fits, the fastest first."""
        return sorted(self.fitting(), key=_order)

    def fitting(self) -> Iterator[Plan]:
        """All that fits, by prediction."""
        for layout in self.space.layouts():
            split = self.split(layout)
            if not split.divides or split.gradients + self._here(split.state) > self.room:
                continue
            keeping = None
            for run in self.space.runs(layout):
                shards = Shards(split, run, self.space.execution)
                keeping = keeping or Keeping(shards, self.target, self.bandwidths)
                yield from self._of_run(shards, keeping)

    def _of_run(self, shards: Shards, keeping: Keeping) -> Iterator[Plan]:
        """What fits of a run. Nothing waits on the host where all fits without: it would only take time."""
        for tried in self._tried(shards, keeping):
            fitting = [(one, used) for one in tried if (used := memory(one)).total <= self.room]
            yield from (self._plan(*one) for one in fitting if on_host(one[0]) <= self.host_room)
            if len(fitting) == len(tried):
                break

    def _tried(self, shards: Shards, keeping: Keeping) -> Iterator[list[Shards]]:
        """A run with each policy of remat; what sends more to the host follows."""
        pinned = self.space.pins.execution.get("remat")
        for host in self.space.placements:
            base = replace(shards, execution=replace(shards.execution, host=host))
            if sum(kept(base).values()) > self.room:
                continue  # whatever remat keeps
            yield [base] if pinned else [base.under(one) for one in keeping.policies(base, self.room)]
            if self.space.offloads:
                yield [base.under(one) for one in keeping.offloads(base, self.room)]

    def _here(self, state: Mapping[str, float]) -> float:
        """Bytes of the state that lie on a device, at least."""
        return sum(size for kind, size in state.items() if kind not in away(self.space.smallest_execution))

    def smallest(self) -> Plan | None:
        """What would take least memory, whether it fits or not; None where no layout divides batch and widths."""
        found = None
        for layout in self.space.layouts():
            split = self.split(layout)
            for run in self.space.runs(layout) if split.divides else ():
                shards = Shards(split, run, self.space.smallest_execution)
                used = memory(shards)
                if found is None or used.total < found.memory.total:
                    found = self._plan(shards, used)
        return found

    def explained(self, plan: Plan) -> Plan:
        """The plan, each line of its step with what it is made of."""
        shards = Shards(self.split(plan.layout), plan.layout, plan.execution)
        return replace(plan, seconds=explained(shards, self.target, self.bandwidths, self.saved_every))

    def split(self, layout: Layout) -> Split:
        """The work under a layout's rows."""
        return Split(self.work, Placement.described(layout, self.target.devices, self.target.platform))

    def _plan(self, shards: Shards, used: Memory) -> Plan:
        recipe = self.space.program.runtime.precision.recipe
        predicted = seconds(shards, self.target, self.bandwidths, self.saved_every)
        return Plan(shards.layout, shards.execution, used, predicted, recipe)


def best_of(planners: Sequence[Planner], count: int) -> list[Plan]:
    """The fastest plans of several searches that are accepted by their own, of each recipe, mesh, ZeRO stage and
    schedule the fastest one; and of a recipe that has none among them, its fastest."""
    every = sorted(((plan, one) for one in planners for plan in one.ranked), key=lambda pair: _order(pair[0]))
    found, seen, recipes = [], set(), set()
    for plan, one in every:
        kind = id(one), *plan.layout.mesh.items(), plan.layout.zero, repr(plan.layout.schedule)
        wanted = len(found) < count or id(one) not in recipes
        if kind not in seen and wanted and (accepted := one.accept(plan)):
            seen.add(kind)
            recipes.add(id(one))
            found.append(one.explained(accepted))
        if len(found) >= count and len(recipes) == len(planners):
            break
    return found


def _order(plan: Plan) -> tuple[float, bool, float]:
    """The fastest first; of two as fast what sends nothing to the host, then what takes less memory."""
    return plan.seconds.total, plan.seconds.sends_to_host, plan.memory.total
