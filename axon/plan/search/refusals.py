"""Why there is no plan, and what would change that."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from axon.chips import chips
from axon.chips.target import Target
from axon.errors import UserError
from axon.plan.predict.memory import GIB
from axon.plan.search.plans import ROOM, Plan, Planner
from axon.plan.search.serving_plans import ServingPlan, ServingPlanner

MOST_DOUBLINGS = 10


def refusal(planner: Planner) -> UserError:
    """The error for a planner that has found nothing."""
    pins, space = planner.space.pins, planner.space
    if pins.names and (freeing := next((name for name in pins.names if _finds(planner, name)), None)):
        return UserError(
            f"--pin {freeing}: no plan on {space.target.name} has it beside the other pins; without it there are some. "
            "Leave it out, or change it"
        )
    if not any(True for _ in space.meshes()):
        return UserError(
            f"Data.batch = {space.program.batch}: no layout of {space.target.devices} devices "
            f"({space.target.name}) divides it, nor this model's widths. A batch of {space.target.devices} sequences "
            "or a multiple always does (--global-batch)"
        )
    if not any(True for layout in space.layouts() for _ in space.runs(layout)):
        return UserError(f"--pin {', '.join(pins.names)}: no layout of {space.target.name} has them")
    least = planner.smallest()
    return _undivided(planner) if least is None else _too_large(planner, least)


def _finds(planner: Planner, name: str) -> bool:
    """Whether there is a plan without a pin."""
    free = replace(planner, space=replace(planner.space, pins=planner.space.pins.without(name)))
    return next(free.fitting(), None) is not None


def _undivided(planner: Planner) -> UserError:
    target, program, pins = planner.target, planner.space.program, planner.space.pins
    pinned = f" with --pin {', '.join(pins.names)}" if pins.names else ""
    return UserError(
        f"no layout of {target.name}{pinned} divides Data.batch = {program.batch}, Data.seq = {program.seq} and this "
        f"model's widths over {target.devices} devices. Choose another number of devices (--on), or a batch that is a "
        "multiple of it (--global-batch)"
    )


def _too_large(planner: Planner, least: Plan) -> UserError:
    target = planner.target
    parts = sorted(least.memory.parts.items(), key=lambda one: -one[1])[:3]
    dominant = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    return UserError(
        f"nothing fits {target.name}: the smallest plan takes {least.memory.gib:.1f} GiB of a device, of "
        f"{target.chip.memory / GIB:.1f} that are planned up to {ROOM:.0%}: {dominant} GiB. By prediction "
        f"{would_fit(target, lambda one: _fits(planner, one))}; or choose a smaller Data.batch or Data.seq"
    )


def _fits(planner: Planner, target: Target) -> bool:
    space = replace(planner.space, target=target)
    return next(replace(planner, space=space, bandwidths=None).fitting(), None) is not None


# ---- machines that something fits ------------------------------------------------------------------------------------


def would_fit(target: Target, fits: Callable[[Target], bool]) -> str:
    """The smallest machine of such chips that something fits, and one of as many others, in words."""
    more, other = _smallest(target, fits), _other(target, fits)
    way = f"it would fit {more.name}" if more else "no number of such chips is enough"
    return f"{way}, and as many devices of {other.name}" if other else way


def _smallest(target: Target, fits: Callable[[Target], bool]) -> Target | None:
    """Of the machines with twice as many chips, again and again, the first that something fits; or by bisection one
    between it and the last that nothing fits."""
    for _ in range(MOST_DOUBLINGS):
        larger = target.doubled()
        if fits(larger):
            machines = [*target.between(larger), larger]
            return machines[bisect_left(machines[:-1], True, key=fits)]
        target = larger
    return None


def _other(target: Target, fits: Callable[[Target], bool]) -> Target | None:
    """A machine of as many devices, whose chip is the one of the least memory that something fits."""
    kinds = [one for one in chips().values() if one.memory > target.chip.memory and one.link is not None]
    machines = (target.of_chip(one) for one in sorted(kinds, key=lambda chip: chip.memory))
    return next((one for one in machines if one and one.platform == target.platform and fits(one)), None)


# ---- of serving ------------------------------------------------------------------------------------------------------


def serving_refusal(
    planner: ServingPlanner, missed: Sequence[ServingPlan], holds: Callable[[Target], bool]
) -> UserError:
    """The error for a workload without a plan: the nearest of `missed`, which comes first, what its steps take, and
    machines on which there is one, of which `holds` knows."""
    nearest, load, name = missed[0], planner.workload, planner.target.name
    what = f"nearest, {nearest.engines} × tensor {nearest.kind.tensor}, weights {nearest.kind.weights!r}"
    if nearest.memory > planner.available:
        return UserError(
            f"no plan fits {name}: {what}: {nearest.unmet}. By prediction {would_fit(planner.target, holds)}; or "
            "choose weights of fewer bits (--format int8), a smaller Capacity.length or requests_per_second"
        )
    decode, mixed = map(_milliseconds, nearest.steps)
    return UserError(
        f"no plan on {name} holds ttft_ms = {load.ttft_ms:g} and tpot_ms = {load.tpot_ms:g} at "
        f"{load.requests_per_second:g} requests a second: {what}: {nearest.unmet}. Milliseconds of a decode step: "
        f"{decode}; of one with a prompt: {mixed}. By prediction {would_fit(planner.target, holds)}; or choose weights "
        "of fewer bits (--format int8), fewer requests_per_second or larger latencies"
    )


def _milliseconds(parts: Mapping[str, float]) -> str:
    """The parts of a step, the longest first."""
    return ", ".join(f"{part} {1e3 * one:.3g}" for part, one in sorted(parts.items(), key=lambda pair: -pair[1]) if one)
