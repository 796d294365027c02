"""The collectives of a compiled program: what they send, over which mesh axes, and whether anything runs meanwhile."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from axon.plan.hlo import Arrays, Instruction, Module, Scheduled, array_bytes
from axon.plan.hlo import arrays as arrays_of

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})?\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Collective:
    """One collective, as one device sees it.

    Args:
        kind: one of `COLLECTIVES`. arrays: dtype and shape of each result.
        source: the traced operation that it comes from, as `jit(_train)/…/dot_general`. name: of the instruction that
            is scheduled, which may be a fusion.
        times: how often it runs in one execution. groups: lists of devices that exchange with each other.
        axes: the mesh axes by name, where the program says them. asynchronous: whether other work may run meanwhile.
    """

    kind: str
    arrays: Arrays
    source: str
    times: int = 1
    groups: tuple[tuple[int, ...], ...] = ()
    axes: tuple[str, ...] = ()
    size: int = 0
    asynchronous: bool = False
    name: str = ""

    @property
    def bytes(self) -> int:
        """Of its results, once."""
        return array_bytes(self.arrays)

    @property
    def sent(self) -> float:
        """Bytes that a device sends, once, in a ring: the least there is to send (Thakur et al. 2005)."""
        n, size = self.bytes, max(self.size, 1)
        if self.kind == "collective-permute":
            return n
        share = (size - 1) / size
        return {"all-reduce": 2 * share * n, "reduce-scatter": (size - 1) * n}.get(self.kind, share * n)

    def mesh_axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes that it runs along, all of each or a part: those in which the devices of a group differ.

        `mesh`: axis → size; devices are numbered in its order, the last axis fastest.
        """
        if self.axes and set(self.axes) <= set(mesh):
            return tuple(axis for axis in mesh if axis in self.axes)
        groups = self.groups or (tuple(range(prod(mesh.values()))),)
        places = [np.array(np.unravel_index(group, tuple(mesh.values()))) for group in groups]
        return tuple(axis for i, axis in enumerate(mesh) if any(len(set(place[i].tolist())) > 1 for place in places))


def collectives(program: str | Module) -> list[Collective]:
    """Every collective of a program's text, each with how often it runs.

    The TPU compiler spreads one transfer over several fusions, in copies: its start is counted. It writes some
    reduce-scatters as a fusion `all-reduce-scatter`, an all-reduce and a slice inside: recognised here by that name.
    """
    module = Module.of(program) if isinstance(program, str) else program
    found = []
    for one in module.scheduled:
        if one.instruction.opcode == "fusion":
            found += _fused(module, one)
        elif kind := _kind(one.instruction):
            found.append(_collective(one.instruction, kind, one.times, one.asynchronous or _started(one.instruction)))
    return found


def _kind(one: Instruction) -> str | None:
    kind = one.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _started(one: Instruction) -> bool:
    return one.opcode.endswith("-start") and '"is_sync":true' not in one.attributes


def _fused(module: Module, scheduled: Scheduled) -> Iterator[Collective]:
    fusion = scheduled.instruction
    inside = list(module.inside(fusion))
    targets = {one.attribute("custom_call_target") or "" for one in inside if one.opcode == "custom-call"}
    text = " ".join((*targets, *(re.findall(r'custom_call_target="(\w+)"', " ".join(o.attributes for o in inside)))))
    start = "AsyncCollectiveStart" in text
    scatters = fusion.called[0].startswith("all-reduce-scatter")
    for one in inside:
        kind = _kind(one)
        copy = not start and ("AsyncCollective" in text or "async_collective_fusion_config" in one.attributes)
        if kind is None or copy:
            continue
        scattered = kind == "all-reduce" and scatters
        result_type = fusion.type if scattered else None
        kind = "reduce-scatter" if scattered else kind
        found = _collective(one, kind, scheduled.times, start or scheduled.asynchronous, result_type)
        yield replace(found, name=fusion.name)


def _collective(
    one: Instruction, kind: str, times: int, asynchronous: bool, result_type: str | None = None
) -> Collective:
    source = _SOURCE.search(one.attributes)
    groups, axes, size = _partners(one.attributes)
    results = _results(one) if result_type is None else arrays_of(result_type)
    return Collective(kind, results, source[1] if source else "", times, groups, axes, size, asynchronous, one.name)


def _results(one: Instruction) -> Arrays:
    """What it makes; the type of a `-start` lists its operands before, where it lists both."""
    found, operands = one.arrays, len(one.operands)
    both = one.opcode.endswith("-start") and len(found) >= 2 * operands
    return found[operands : 2 * operands] if both else found


def _partners(attributes: str) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...], int]:
    """Groups of devices, or else names of mesh axes; and how many devices exchange with each other."""
    if named := _NAMED.search(attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        names = tuple(axis for axis, _ in used)
        groups = () if any(part for _, part in used) else _along(sizes, names)
        return groups, names, prod(int(part or sizes[axis]) for axis, part in used)
    if iota := _IOTA.search(attributes):
        shape = [int(n) for n in iota[3].split(",")]
        numbers = np.arange(prod(shape)).reshape(shape)
        numbers = numbers.transpose([int(n) for n in iota[4].split(",")]) if iota[4] else numbers
        groups = tuple(tuple(row) for row in numbers.reshape(int(iota[1]), int(iota[2])).tolist())
        return groups, (), int(iota[2])
    listed = _LISTED.search(attributes) or _PAIRS.search(attributes)
    found = re.findall(r"\{([\d,]+)\}", listed[1]) if listed and listed[1] else []
    groups = tuple(tuple(int(n) for n in group.split(",")) for group in found)
    return groups, (), max(map(len, groups), default=0)


def _along(mesh: Mapping[str, int], axes: Collection[str]) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that differ in these axes only: XLA's GPU compiler names a mesh of its own, not ours."""
    numbers = np.arange(prod(mesh.values())).reshape(tuple(mesh.values()))
    inner = [i for i, axis in enumerate(mesh) if axis in axes]
    outer = [i for i, axis in enumerate(mesh) if axis not in axes]
    rows = numbers.transpose([*outer, *inner]).reshape(-1, prod(numbers.shape[i] for i in inner))
    return tuple(tuple(row) for row in rows.tolist())
