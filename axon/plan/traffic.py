"""A step's collectives summed up for a person: what each mesh axis carries, how often and how much."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax

from axon.axes.patterns import Names
from axon.plan.communication import UPDATES, Communication, Transfer, communication
from axon.plan.origin import phase
from axon.plan.scopes import scopes
from axon.train.step import Program

WEIGHTS, STATE, BATCH = "weights", "optimizer state", "batch"


@dataclass(frozen=True)
class TransferGroup:
    """The transfers of one kind over one mesh axis (or several together) of one content.

    Args:
        content: as "weights, forward". times: collectives per step. bytes: that one device sends per step.
        parts: the parts of the model they belong to, those that send most first.
        overlappable: see `Transfer`; the mean over bytes.
    """

    mesh_axes: Names
    kind: str
    content: str
    times: int
    bytes: float
    parts: tuple[str, ...]
    overlappable: float


def summary(transfers: Iterable[Transfer], order: Sequence[str]) -> list[TransferGroup]:
    """Groups by mesh axis, in the mesh's `order`, and by bytes."""
    groups: dict[tuple[Names, str, str], list[Transfer]] = {}
    for one in transfers:
        groups.setdefault((one.mesh_axes, one.kind, content(one)), []).append(one)
    found = [_group(*key, transfers) for key, transfers in groups.items()]
    return sorted(found, key=lambda one: ([order.index(a) for a in one.mesh_axes], -one.bytes))


def _group(mesh_axes: Names, kind: str, what: str, group: Sequence[Transfer]) -> TransferGroup:
    parts: dict[str, float] = {}
    for one in group:
        parts[part(one.stack)] = parts.get(part(one.stack), 0) + one.bytes * one.times
    total = sum(parts.values())
    overlappable = sum(one.overlappable * one.bytes * one.times for one in group) / total if total else 0.0
    named = tuple(sorted(filter(None, parts), key=lambda name: -parts[name]))
    return TransferGroup(mesh_axes, kind, what, sum(one.times for one in group), total, named, overlappable)


def content(one: Transfer) -> str:
    """The content of a transfer, and its phase of the step."""
    moment = phase(one.stack)
    if one.source == WEIGHTS:
        return f"weights, {'backward' if moment == 'recomputed' else moment or 'after the update'}"
    if one.source or moment:
        return one.source or f"activations, {moment}"
    return "norms and metrics" if one.kind == "all-reduce" else UPDATES


def part(stack: str) -> str:
    """The outermost named scope of a name stack: `attention` of `jvp(attention)/norm`; "" if there is none."""
    return next(iter(scopes(stack)), "")


def step_communication(program: Program) -> Communication:
    """The collectives of a program's training step, those of parameters and batch labelled as such."""
    jaxpr = program.trace().jaxpr.jaxpr
    state = jax.tree_util.tree_leaves_with_path(program.abstract_state())
    labels = [WEIGHTS if jax.tree_util.GetAttrKey("parameters") in path[:2] else STATE for path, _ in state]
    inputs = labels + [BATCH] * len(program.evaluator.abstract_batch)
    inputs += [WEIGHTS] * len(jax.tree.leaves(program.references.abstract))
    constants = [""] * (len(jaxpr.invars) - len(inputs))  # which tracing puts first
    metrics = [""] * (len(jaxpr.outvars) - len(labels))
    return communication(jaxpr, constants + inputs, labels + metrics)
