"""Plans for the run that a file describes: the search, and what is compiled of it."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from axon.axes.execution import RematByKind, is_policy
from axon.chips.target import Target
from axon.config import load
from axon.disk import cache_folder
from axon.errors import UserError, suggest
from axon.layout import Layout, Placement
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work
from axon.plan.report import Report
from axon.plan.report_cache import ReportCache
from axon.plan.search import Pins, Plan, Planner
from axon.plan.search.confirm import Confirmation, Dropped
from axon.plan.search.plans import Acceptance, best_of
from axon.plan.search.reasons import why_not
from axon.plan.search.refusals import refusal
from axon.plan.search.space import Space
from axon.plan.search.tables import matrices_of
from axon.plan.topology import devices
from axon.run import Train, program
from axon.show.question import Question
from axon.train.step import Program

PLANNED = (
    "mesh",
    "rows",
    "params",
    "zero",
    "microbatches",
    "schedule",
    "pad_layers",
    "overlap",
    "replicate_kv",
    "context",
)
"""The fields of a layout that a plan says; the others are the config's."""


@dataclass(frozen=True)
class Plans:
    """The best plans of a search, the fastest first.

    `run`: what they are for. `tried`: how many fit, by prediction. `took`: seconds of the search. `dropped`: what does
    not fit as compiled.
    """

    question: Question
    run: Train
    target: Target
    plans: tuple[Plan, ...]
    tried: int
    took: float
    dropped: tuple[Dropped, ...] = ()


def plan_config(question: Question, count: int, compiling: Callable[[str], None] | None = None) -> Plans:
    """The best plans for a run on a machine.

    `compiling`: told of each plan as it is compiled; None compiles nothing.

    Raises `ConfigError` and `UserError` for what a person has to change: a target that there is not, or that nothing
    can be compiled for, a model that fits nowhere, a batch that nothing divides, pins that leave nothing.
    """
    begun = time.perf_counter()
    trees, planners, dropped = [], [], []
    for tree, planner in map(read_question, question.of_each_format()):
        trees.append(tree)
        if compiling:
            confirmation = _confirmation(tree, planner, compiling)
            planner, dropped = _compilable(planner, confirmation), [*dropped, confirmation.dropped]
        planners.append(planner)
    target, found = planners[0].target, best_of(planners, count)
    dropped = tuple(one for several in dropped for one in several)
    if not found:
        raise _none_fits(target, dropped) if dropped else refusal(planners[0])
    best, *others = found
    plans = (best, *(replace(one, why_not=why_not(one, best)) for one in others))
    tried = sum(len(planner.ranked) for planner in planners)
    return Plans(question, trees[0], target, plans, tried, time.perf_counter() - begun, dropped)


def _confirmation(tree: Train, planner: Planner, say: Callable[[str], None]) -> Confirmation:
    """What compiles a plan for the target's own devices."""
    target, cache = planner.target, ReportCache(cache_folder() / "reports")
    if target.platform == "cpu":
        raise UserError(f"--compile asks the compiler of a TPU or GPU, and {target.name} is this machine: leave it out")
    machine = devices(target.name)

    def report(plan: Plan) -> Report:
        planned = replace(tree, layout=plan.layout, execution=plan.execution)
        return cache.report(program(planned, Placement.of(plan.layout, machine)), target.name)

    return Confirmation(planner.accept, report, target.chip.memory, say)


def _compilable(planner: Planner, confirmation: Confirmation) -> Planner:
    """The search among what can be compiled: GPUs that are only described name no memories, which state on the host
    needs."""
    hosts = () if planner.target.platform == "gpu" else planner.space.hosts
    return replace(planner, accept=confirmation, space=replace(planner.space, hosts=hosts))


def _none_fits(target: Target, dropped: Sequence[Dropped]) -> UserError:
    least = min(dropped, key=lambda one: one.needed or math.inf)
    return UserError(
        f"no plan fits {target.name} as compiled; of {len(dropped)} that should by prediction the smallest: "
        f"{least.reason}\nChoose more devices (--on), a smaller Data.batch or Data.seq, or pin what takes less memory "
        "(--pin Execution.remat='full')"
    )


def read_question(question: Question) -> tuple[Train, Planner]:
    """The run, and the search for its plans. Raises as `plan_config`."""
    tree: Train = replace(load(question.config, [*question.overrides, *question.pins]).tree, plan=None)
    target = question.target  # whose chip may be of a module that the config imports
    bandwidths = question.links and Bandwidths.read(question.links, target)
    return tree, planner_of(tree, target, _pins(tree, question.pins), bandwidths)


def planner_of(tree: Train, target: Target, pins: Pins = Pins(), bandwidths: Bandwidths | None = None) -> Planner:
    """The search for plans of a run on a machine. Raises `UserError` for a run whose steps are not predicted."""
    check_predicted(tree, target)
    base = alone(tree, target.platform)
    if "remat" in pins.execution:
        check_one_policy(tree.execution.remat)
    work = Work.of(base)
    space = Space(base, target, base.placement.layout, tree.execution, pins, matrices_of(work))
    if target.chip.host_memory is not None:
        offloads = not {"remat", "host"} & set(pins.execution)
        space = replace(space, offloads=offloads, hosts=_hosts(tree, target, pins))
    return Planner(space, work, _acceptance(tree, target), bandwidths, tree.checkpoints.every)


def _hosts(tree: Train, target: Target, pins: Pins) -> tuple[tuple[str, ...], ...]:
    """The kinds of array that a plan may have in the host's memory besides the config's own: the optimizer's state,
    where the program composes with that."""
    execution = tree.execution
    if "host" in pins.execution or "optimizer" in execution.host:
        return ()
    moved = (*execution.host, "optimizer")
    try:
        alone(replace(tree, execution=replace(execution, host=moved)), target.platform)
    except UserError:
        return ()
    return (moved,)


def check_predicted(tree: Train, target: Target) -> None:
    """Raise `UserError` for a run that the target cannot carry out, or whose steps are not predicted."""
    if (recipe := tree.precision.recipe) is not None:
        recipe.check_chip(target.chip, target.chip.name)
        if recipe.emulate:
            raise UserError(
                f"{type(recipe).__name__}.emulate: axon plan predicts no emulated products. Set it to False to plan "
                "for a chip that has them, or Precision.recipe to None"
            )
    if tree.execution.disk:
        raise UserError(
            f"Execution.disk = {dict(tree.execution.disk)}: axon plan does not predict state in files. Set it to {{}}, "
            "or Execution.host to ('optimizer',)"
        )


def resized(planner: Planner, tree: Train, target: Target, batch: int) -> Planner:
    """The search for the same run on another machine of such chips, with another number of sequences in a step."""
    tree = replace(tree, data=replace(tree.data, batch=batch))
    base = alone(tree, target.platform)
    space, work = replace(planner.space, program=base, target=target), replace(planner.work, program=base)
    return replace(planner, space=space, work=work, accept=_acceptance(tree, target))


def own_shards(tree: Train, placement: Placement) -> Shards:
    """What a device has of the step of a run on its own layout."""
    work = Work.of(alone(tree, placement.platform))
    return Shards(Split(work, placement), placement.layout, tree.execution)


def alone(tree: Train, platform: str) -> Program:
    """The program on one described device, whose layout has the config's own fields that no plan says."""
    others = {field.name: value for field, value in own_values(tree.layout) if field.name not in PLANNED}
    start = Layout(mesh={"data": 1}, **others).with_axes_of(tree.layout)
    return program(replace(tree, layout=start, plan=None), Placement.described(start, 1, platform))


def _acceptance(tree: Train, target: Target) -> Acceptance:
    """What builds the real program of a plan."""

    def accept(plan: Plan) -> Plan | None:
        placement = Placement.described(plan.layout, target.devices, target.platform)
        try:
            program(replace(tree, layout=plan.layout, execution=plan.execution), placement)
        except UserError:
            return None
        return plan

    return accept


def check_one_policy(remat: RematByKind) -> None:
    """Raise `UserError` for a policy by kind of block, which is not predicted."""
    if not is_policy(remat):
        raise UserError(
            f"--pin Execution.remat = {remat!r}: a plan has one policy for all kinds of block, by its name, as a "
            "tuple of what is kept, or as activation → what becomes of it. Write it so, or leave the pin out"
        )


def _pins(tree: Train, pins: Sequence[str]) -> Pins:
    """The pinned fields, as the tree has them. Raises `UserError` for another part's."""
    own: dict[str, dict[str, Any]] = {"Layout": {}, "Execution": {}}
    parts = {"Layout": tree.layout, "Execution": tree.execution}
    for pin in pins:
        part, _, name = pin.partition("=")[0].strip().rpartition(".")
        if part not in own:
            raise UserError(
                f"--pin {pin}: a plan is a Layout and an Execution.{suggest(part, own)} What else is to change is "
                "given by --set"
            )
        own[part][name] = {field.name: value for field, value in own_values(parts[part])}[name]
    return Pins(own["Layout"], own["Execution"])


def own_values(part: Any) -> Iterator[tuple[Any, Any]]:
    """The fields of a dataclass, and what they are."""
    return ((field, vars(part)[field.name]) for field in fields(part))
