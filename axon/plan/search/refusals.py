"""Why there is no plan, and what would change that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from axon.chips.target import Target
from axon.errors import UserError
from axon.plan.predict.memory import GIB
from axon.plan.search.plans import ROOM, Planner
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
    return _too_large(planner)


def _finds(planner: Planner, name: str) -> bool:
    """Whether there is a plan without a pin."""
    free = replace(planner, space=replace(planner.space, pins=planner.space.pins.without(name)))
    return next(free.fitting(), None) is not None


def _too_large(planner: Planner) -> UserError:
    least, target = planner.smallest(), planner.target
    parts = sorted(least.memory.parts.items(), key=lambda one: -one[1])[:3]
    dominant = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    larger = _first(target, lambda one: _fits(planner, one))
    way = f"it would fit {larger.name}" if larger else "no number of such chips is enough"
    return UserError(
        f"nothing fits {target.name}: the smallest plan takes {least.memory.gib:.1f} GiB of a device, of "
        f"{target.chip.memory / GIB:.1f} that are planned up to {ROOM:.0%}: {dominant} GiB. By prediction {way}; or "
        "choose a chip with more memory, a smaller Data.batch or Data.seq"
    )


def _fits(planner: Planner, target: Target) -> bool:
    space = replace(planner.space, target=target)
    return next(replace(planner, space=space).fitting(), None) is not None


def _first(target: Target, fits: Callable[[Target], bool]) -> Target | None:
    """The smallest of the machines with twice as many chips, again and again, that something fits."""
    for _ in range(MOST_DOUBLINGS):
        target = target.doubled()
        if fits(target):
            return target
    return None


def serving_refusal(planner: ServingPlanner, missed: Sequence[ServingPlan]) -> UserError:
    """The error for a workload without a plan: the nearest of `missed`, which comes first, and what its steps take."""
    nearest, load, name = missed[0], planner.workload, planner.target.name
    what = f"nearest, {nearest.engines} × tensor {nearest.kind.tensor}, weights {nearest.kind.weights!r}"
    if nearest.memory > planner.available:
        return UserError(
            f"no plan fits {name}: {what}: {nearest.unmet}. Choose a chip with more memory or a larger slice (--on), "
            "weights of fewer bits (--format int8), a smaller Capacity.length or requests_per_second"
        )
    decode, mixed = map(_milliseconds, nearest.steps)
    return UserError(
        f"no plan on {name} holds ttft_ms = {load.ttft_ms:g} and tpot_ms = {load.tpot_ms:g} at "
        f"{load.requests_per_second:g} requests a second: {what}: {nearest.unmet}. Milliseconds of a decode step: "
        f"{decode}; of one with a prompt: {mixed}. Choose more devices (--on), weights of fewer bits (--format int8), "
        "fewer requests_per_second or larger latencies"
    )


def _milliseconds(parts: Mapping[str, float]) -> str:
    """The parts of a step, the longest first."""
    return ", ".join(f"{part} {1e3 * one:.3g}" for part, one in sorted(parts.items(), key=lambda pair: -pair[1]) if one)
