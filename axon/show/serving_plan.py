"""`axon plan` on serving: engines for a workload, as a table, as JSON and as a file to serve."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rich.console import Console

from axon.chips.target import Target
from axon.config import load
from axon.errors import UserError, suggest
from axon.kernels.choice import check_names
from axon.layout import Layout, Placement
from axon.nn.capabilities import HasDims
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.memory import GIB
from axon.plan.search.refusals import serving_refusal
from axon.plan.search.serving_plans import EngineKind, ServingPlan, ServingPlanner
from axon.plan.workload import Workload
from axon.run import Planned, Serve, serving_program
from axon.run.planned import model_sizes
from axon.show.plan import empty_table, write_planned
from axon.show.question import Question

FORMATS = get_args(get_type_hints(Serve)["weights"])
PLANNED = ("requests", "tokens", "cache_tokens")
"""The fields of a capacity that a plan says; the others are the config's."""

MOST_TENSOR = 16

# ---- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithoutPlan:
    """A kind of engine, by the format of its weights and the size of `tensor`, that has no plan, and why."""

    weights: str
    tensor: int
    reason: str


@dataclass(frozen=True)
class ServingPlans:
    """The best plan of each kind of engine, the best first, and the kinds without one."""

    question: Question
    target: Target
    plans: tuple[ServingPlan, ...]
    without: tuple[WithoutPlan, ...]


def plan_serving(question: Question, traffic: Path, count: int) -> ServingPlans:
    """The best plans for the model that a file serves, and the workload in the file `traffic`.

    Raises `ConfigError` and `UserError` for what a person has to change: a target or a format that there is not, a
    field of the workload, a model that fits nowhere, latencies that no plan holds, a part that is not predicted.
    """
    workload = Workload.read(traffic)
    for name in question.formats:
        if name not in FORMATS:
            raise UserError(f"--format {name}: must be a format of Serve.weights.{suggest(name, FORMATS)}")
    changes = [(f"Serve.weights={name!r}",) for name in dict.fromkeys(question.formats)] or [()]
    trees = [load(question.config, [*question.overrides, *change], root="Serve").tree for change in changes]
    target = question.target  # whose chip may be of a module that the config imports
    planner, refused = _planner(trees, target, workload)
    if question.links:
        planner = replace(planner, bandwidths=Bandwidths.read(question.links, target))
    plans, missed = planner.best()
    if not plans:
        raise serving_refusal(planner, missed, lambda one: bool(_planner(trees, one, workload)[0].best()[0]))
    without = [WithoutPlan(one.kind.weights, one.kind.tensor, one.unmet) for one in missed]
    return ServingPlans(question, target, tuple(plans[:count]), (*without, *refused))


def _planner(trees: Sequence[Serve], target: Target, workload: Workload) -> tuple[ServingPlanner, list[WithoutPlan]]:
    """The search on a machine, and the engines that the model refuses."""
    tried = [kind for tree in trees for kind in _kinds(tree, target)]
    kinds = [kind for kind in tried if isinstance(kind, EngineKind)]
    _check_length(kinds[0], workload)
    refused = [kind for kind in tried if isinstance(kind, WithoutPlan)]
    return ServingPlanner(kinds, target, Bandwidths.of(target), workload), refused


def _kinds(tree: Serve, target: Target) -> Iterator[EngineKind | WithoutPlan]:
    """The engines of a config, for each size of `tensor`, and which sizes its model refuses. Raises `UserError` where
    it is refused on one device."""
    if tree.draft is not None:
        raise UserError(f"Serve.draft = {tree.draft!r}: axon plan predicts no drafts; set it to None")
    check_names(tree.execution.kernels)
    tree = replace(tree, execution=replace(tree.execution, kernels={}))  # which none of a described device has
    for tensor in range(1, min(target.linked, MOST_TENSOR) + 1):
        if target.linked % tensor:
            continue
        try:
            kind = _kind(tree, target, tensor)
        except UserError as error:
            if tensor == 1:
                raise
            yield WithoutPlan(tree.weights, tensor, str(error))
            continue
        if kind.program.encoder.lengths:
            raise UserError("Serve.model reads its prompts by an encoder, whose time axon plan does not predict")
        yield kind


def _kind(tree: Serve, target: Target, tensor: int) -> EngineKind:
    alone = replace(tree.layout, mesh={"data": 1}, replicate_kv=1)
    program = serving_program(replace(tree, layout=alone), Placement.described(alone, 1, target.platform))
    if tensor > 1:
        layout = replace(alone, mesh={"tensor": tensor}, replicate_kv=_replicate_kv(program.runtime.module, tensor))
        placement = Placement.described(layout, tensor, target.platform)
        program = serving_program(replace(tree, layout=layout), placement)
    return EngineKind(tree.weights, tensor, program)


def _replicate_kv(module: Any, tensor: int) -> int:
    dims = module.dims if isinstance(module, HasDims) else {}
    return tensor // math.gcd(dims.get("kv_heads", tensor), tensor)


def _check_length(kind: EngineKind, workload: Workload) -> None:
    mean, length = workload.prompt_tokens + workload.answer_tokens, kind.program.length
    if mean > length:
        raise UserError(
            f"prompt_tokens + answer_tokens (--traffic) are {mean:g}, and a request has {length} tokens at most: lower "
            "them, or raise Capacity.length"
        )


# ---- for a person ----------------------------------------------------------------------------------------------------


def print_serving_plans(found: ServingPlans) -> None:
    """A table of the plans, a decode step of the best one, and why the others lost."""
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    headings = ("devices", "engines", "tensor", "weights", "rows", "step tokens", "cache tokens", "GiB")
    latencies = ("rows in use", "busy", "ttft ms", "tpot ms")
    table = empty_table(f"{found.question.config} on {found.target.name}", "plan", *headings, *latencies)
    for number, plan in enumerate(found.plans, 1):
        table.add_row(str(number), *_row(plan))
    step = empty_table("steps of plan 1, ms", "part", "decode", "with a prompt")
    decode, mixed = found.plans[0].steps
    for name in {**decode, **mixed}:
        step.add_row(name, *(f"{1e3 * parts.get(name, 0.0):.2f}" for parts in (decode, mixed)))
    console.print(table, step, sep="\n")
    lines = [f"plan {number}: {plan.why_not}" for number, plan in enumerate(found.plans[1:], 2)]
    lines += [f"no plan with tensor {one.tensor}, {one.weights}: {one.reason}" for one in found.without]
    lines.append("predicted, not measured; latencies are means. Busy: of the time, in steps with a prompt")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _row(plan: ServingPlan) -> Iterator[str]:
    capacity, steady = plan.capacity, plan.steady
    yield from map(str, (plan.devices, plan.engines, plan.kind.tensor, plan.kind.weights, capacity.requests))
    yield f"{capacity.tokens:,}"
    yield f"{capacity.cache_tokens:,}"
    yield f"{plan.memory / GIB:.1f}"
    yield f"{steady.rows:.1f}"
    yield f"{steady.busy:.0%}"
    yield f"{1e3 * steady.ttft:.3g}"
    yield f"{1e3 * steady.tpot:.3g}"


# ---- for programs ----------------------------------------------------------------------------------------------------


def serving_plans_json(found: ServingPlans) -> dict[str, Any]:
    """As plain dicts, lists, numbers and strings."""
    plans, without = [_json(plan) for plan in found.plans], [asdict(one) for one in found.without]
    target = {"target": found.target.name, "config": str(found.question.config)}
    return target | {"plans": plans, "without_plan": without}


def _json(plan: ServingPlan) -> dict[str, Any]:
    capacity, steady = plan.capacity, plan.steady
    return {
        "devices": plan.devices,
        "engines": plan.engines,
        "tensor": plan.kind.tensor,
        "weights": plan.kind.weights,
        "capacity": {name: vars(capacity)[name] for name in PLANNED},
        "memory_gib": round(plan.memory / GIB, 3),
        "rows_in_use": steady.rows,
        "utilisation": steady.busy,
        "ttft_ms": 1e3 * steady.ttft,
        "tpot_ms": 1e3 * steady.tpot,
        "decode_ms": {name: 1e3 * seconds for name, seconds in plan.steps[0].items()},
        "prompt_ms": {name: 1e3 * seconds for name, seconds in plan.steps[1].items()},
        **({"why_not": plan.why_not} if plan.why_not else {}),
    }


def write_serving_plan(found: ServingPlans, path: Path) -> None:
    """Write the best plan as a file that `--plan` lays over the config that serves.

    Raises `UserError` for a file that is no `.gin`, or cannot be written.
    """
    best = found.plans[0]
    latencies = f"ttft {1e3 * best.steady.ttft:.3g} ms, tpot {1e3 * best.steady.tpot:.3g} ms"
    own = f"{best.memory / GIB:.1f} GiB of a device, {latencies}"
    planned = Planned(found.target.name, best.devices, model_sizes(best.kind.program.runtime.model))
    write_planned("Serve", planned, own, _gin(best), path)


def _gin(best: ServingPlan) -> Iterator[str]:
    layout: Layout = best.kind.program.runtime.placement.layout
    yield f"Serve.weights = {best.kind.weights!r}"
    yield f"Layout.mesh = {_mesh(best)!r}"
    yield f"Layout.replicate_kv = {layout.replicate_kv}"
    yield from (f"Capacity.{name} = {vars(best.capacity)[name]}" for name in PLANNED)


def _mesh(plan: ServingPlan) -> dict[str, int]:
    sizes = {"data": plan.engines, "tensor": plan.kind.tensor}
    return {axis: size for axis, size in sizes.items() if size > 1} or {"data": 1}
