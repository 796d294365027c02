"""Engines for a workload: how many, split over how many devices, with which capacity, on the fewest devices."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from axon.chips.target import Target
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.memory import GIB
from axon.plan.predict.serving_steps import ServingSteps
from axon.plan.search.plans import ROOM
from axon.plan.workload import Workload
from axon.serve.capacity import Capacity
from axon.serve.program import ServingProgram

MOST_BUSY = 0.9
"""The share of the time in steps with a prompt, and of the rows that are in use, at most."""

BUDGETS = (256, 1024, 4096)
"""Tokens of a step that are tried besides the config's: sizes that are compiled in any case."""

ROWS, MOST_ROUNDS = 8, 500


@dataclass(frozen=True)
class EngineKind:
    """An engine that is tried: the format of its `weights`, the size of mesh axis `tensor`, and its program, with the
    config's capacity."""

    weights: str
    tensor: int
    program: ServingProgram


@dataclass(frozen=True)
class Steady:
    """The steady state of an engine.

    `rows`: requests that write, on average. `busy`: the share of the time in steps with a prompt. `ttft`, `tpot`:
    seconds.
    """

    rows: float
    busy: float
    ttft: float
    tpot: float


OVERLOADED = Steady(0.0, 1.0, math.inf, math.inf)
"""Of an engine that cannot keep up."""


@dataclass(frozen=True)
class ServingPlan:
    """So many engines of a kind.

    `memory`: bytes of a device. `steps`: seconds by part of a step that decodes, and of one with a prompt. `unmet`:
    what it does not hold; empty in an answer. `why_not`: why it is not the best.
    """

    kind: EngineKind
    engines: int
    capacity: Capacity
    memory: int
    steady: Steady
    steps: tuple[Mapping[str, float], Mapping[str, float]]
    unmet: str = ""
    why_not: str = ""

    @property
    def devices(self) -> int:
        return self.engines * self.kind.tensor


def steady_state(seconds: Callable[[float, float], float], workload: Workload, rate: float, budget: int) -> Steady:
    """The state of an engine that gets `rate` requests a second, λ; `OVERLOADED` where it cannot keep up.

    A prompt takes n = prompt ÷ (budget − rows) steps of q seconds, in which each request that writes has a token too;
    other steps take d. Where prompts share steps, those with one take ρ = λnq of the time; a prompt alone takes ⌈n⌉, so
    that there are k = n + (1 − ρ)(⌈n⌉ − n) for each, and a token comes every d ÷ (1 − λk (q − d)) seconds. By Little's
    law rows = λ · answer · tpot, whose least solution is reached from below.

    A request waits for the step under way, half of tpot where any writes; then prompts share what is left of each step
    equally, so that they take 1 ÷ (1 − ρ) times as long as one alone, however lengths vary (M/G/1 with processor
    sharing: Kleinrock, Queueing Systems II, 1976).

    Args:
        seconds: of a step with so many tokens, which reads the keys and values of so many requests. budget: tokens of a
            step, at most.
    """
    rows = 0.0
    for _ in range(MOST_ROUNDS):
        writing = max(1.0, rows)
        if writing >= budget:
            return OVERLOADED
        decode, mixed = seconds(writing, writing), seconds(budget, writing + 1)
        steps = workload.prompt_tokens / (budget - writing)
        busy = rate * steps * mixed
        own = steps + (1 - busy) * (math.ceil(steps) - steps)
        if busy >= 1 or rate * own * mixed >= 1:
            return OVERLOADED
        tpot = decode / (1 - rate * own * (mixed - decode))
        before, rows = rows, rate * workload.answer_tokens * tpot
        if rows <= before * (1 + 1e-6):
            whole = math.ceil(steps) - 1
            last = workload.prompt_tokens - whole * (budget - writing)
            alone = whole * mixed + seconds(writing + last, writing + 1)
            return Steady(rows, busy, min(1.0, rows) * tpot / 2 + alone / (1 - busy), tpot)
    return OVERLOADED


@dataclass(frozen=True)
class ServingPlanner:
    """The search for the plans of a workload on a machine. `kinds`: the engines that are tried."""

    kinds: Sequence[EngineKind]
    target: Target
    bandwidths: Bandwidths
    workload: Workload

    def best(self) -> tuple[list[ServingPlan], list[ServingPlan]]:
        """Of each kind the plan with the fewest devices, those with the fewest first; and of the kinds without one,
        what comes nearest."""
        found = [self._best_of(kind) for kind in self.kinds]
        held = sorted((one for one in found if not one.unmet), key=self._order)
        missed = sorted((one for one in found if one.unmet), key=self.excess)
        return [self._explained(one, held[0]) for one in held], missed

    def excess(self, plan: ServingPlan) -> tuple[float, float]:
        """What it takes of the memory beyond the share that a plan may take, and the larger of both latencies as a
        share of what is stated; nearer plans have less."""
        steady, load = plan.steady, self.workload
        stated = max(1e3 * steady.ttft / load.ttft_ms, 1e3 * steady.tpot / load.tpot_ms)
        return max(1.0, plan.memory / self.available), stated

    @property
    def available(self) -> float:
        """Bytes of a device that a plan may take."""
        return ROOM * self.target.chip.memory

    def plan(self, kind: EngineKind, budget: int, engines: int) -> ServingPlan:
        """So many engines of a kind whose steps have `budget` tokens, whether or not they hold what is stated."""
        load, runtime, length = self.workload, kind.program.runtime, kind.program.length
        start = replace(kind.program.capacity, requests=1, tokens=budget, cache_tokens=length)
        steps = ServingSteps(ServingProgram(runtime, start), self.target, self.bandwidths, round(load.context))
        steady = steady_state(steps.seconds, load, load.requests_per_second / engines, budget)
        rows, writing = min(rows_for(steady.rows), budget), max(1.0, steady.rows)
        tokens = math.ceil(rows * (load.prompt_tokens + load.answer_tokens))
        capacity = replace(start, requests=rows, cache_tokens=max(length, tokens))
        program = ServingProgram(runtime, capacity)
        memory = program.parameter_bytes() + program.cache_bytes()
        parts = steps.parts(writing, writing), steps.parts(budget, writing + 1)
        plan = ServingPlan(kind, engines, capacity, memory, steady, parts)
        return replace(plan, unmet=next(self._unmet(plan), ""))

    # ---- parts ----------------------------------------------------------------------------------------------------

    def _best_of(self, kind: EngineKind) -> ServingPlan:
        """The plan of a kind with the fewest engines, or what comes nearest with as many as there can be."""
        budgets = sorted({kind.program.capacity.tokens, *BUDGETS})
        plans = [self._fewest(kind, budget) for budget in budgets]
        held = [one for one in plans if not one.unmet]
        return min(held, key=self._order) if held else min(reversed(plans), key=self.excess)

    def _order(self, plan: ServingPlan) -> tuple[int, tuple[float, float]]:
        return plan.devices, self.excess(plan)

    def _fewest(self, kind: EngineKind, budget: int) -> ServingPlan:
        """By bisection: whatever more engines share is less for each."""
        target = self.target
        low, high = 0, (target.linked // kind.tensor) * (target.devices // target.linked)
        best = self.plan(kind, budget, high)
        while not best.unmet and high - low > 1:
            middle = (low + high) // 2
            plan = self.plan(kind, budget, middle)
            low, high, best = (low, middle, plan) if not plan.unmet else (middle, high, best)
        return best

    def _unmet(self, plan: ServingPlan) -> Iterator[str]:
        """What a plan does not hold, in words; what it takes of memory first."""
        steady, load, capacity = plan.steady, self.workload, plan.capacity
        if plan.memory > self.available:
            sizes = f"{plan.memory / GIB:.1f} GiB of a device, of {self.available / GIB:.1f} that a plan may take"
            yield f"weights and pages for {capacity.cache_tokens:,} tokens take {sizes}"
        if math.isinf(steady.tpot):
            yield f"an engine cannot keep up with {load.requests_per_second / plan.engines:.3g} requests a second"
        if steady.busy > MOST_BUSY:
            yield f"steps with a prompt take {steady.busy:.0%} of the time, above {MOST_BUSY:.0%}"
        if capacity.requests >= capacity.tokens:
            yield f"the requests that write leave no room for prompts in steps of {capacity.tokens} tokens"
        if 1e3 * steady.ttft > load.ttft_ms:
            yield f"ttft is {1e3 * steady.ttft:.3g} ms, above {load.ttft_ms:g}"
        if 1e3 * steady.tpot > load.tpot_ms:
            yield f"tpot is {1e3 * steady.tpot:.3g} ms, above {load.tpot_ms:g}"

    def _explained(self, plan: ServingPlan, best: ServingPlan) -> ServingPlan:
        """With `why_not`, of all but the best: what an engine less would not hold, or the latencies beside the best."""
        if plan is best:
            return plan
        more = plan.devices - best.devices
        count = f"{more} more device{'s' if more > 1 else ''}" if more else "as many devices"
        if more and plan.engines > 1:
            fewer = self.plan(plan.kind, plan.capacity.tokens, plan.engines - 1)
            return replace(plan, why_not=f"{count}: with an engine less, {fewer.unmet}")
        own, other = (f"{1e3 * one.ttft:.3g} and {1e3 * one.tpot:.3g} ms" for one in (plan.steady, best.steady))
        return replace(plan, why_not=f"{count}: ttft and tpot are {own}, those of the best {other}")


def rows_for(writing: float) -> int:
    """Rows of an engine in which so many requests write on average: up to `MOST_BUSY` of them, and two standard
    deviations more than the mean, as their number is Poisson's; a multiple of `ROWS`."""
    return ROWS * max(1, math.ceil(max(writing / MOST_BUSY, writing + 2 * math.sqrt(writing)) / ROWS))
