"""The lines of a step with what they are made of: bytes, latency, algorithm, what hides them, whose axes they are."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from axon.chips.target import Target
from axon.plan.predict.links import Bandwidths, Links
from axon.plan.predict.seconds import (
    COMMUNICATION,
    CONTEXT,
    ELEMENTWISE,
    EXPERTS,
    HOST,
    INPUT,
    OFFLOADED,
    SAVES,
    STAGES,
    TENSOR,
    UPDATE,
    WEIGHTS,
    Line,
    Seconds,
    lines,
    seconds,
)
from axon.plan.predict.shards import Shards, Split

BEHIND = {
    TENSOR: "products, in rings",
    WEIGHTS: "products of the layer",
    CONTEXT: "products of the layer",
    STAGES: "work of the tick",
    OFFLOADED: "work of the layers",
    INPUT: "the step before",
}
"""Line → what hides it."""

DIRECT = {EXPERTS: "all-to-all", STAGES: "to the neighbour"}
"""Lines that are no gathers → how they are sent."""


@dataclass(frozen=True)
class _Bytes(Links):
    """Links that take a second for a byte that a device sends, and note the algorithms of gathers by their axes."""

    noted: dict[frozenset[str], str] = field(default_factory=dict)

    def gather(self, mesh_axes: Collection[str], size: float) -> float:
        near, far = self.group(mesh_axes)
        if near * far > 1 and size:
            timed = Links(self.target, self.mesh, self.bandwidths)
            self.noted[frozenset(mesh_axes)] = timed.algorithm(mesh_axes, size)
        return (near - 1) / near * size + (far - 1) / far * size / near

    def exchange(self, mesh_axes: Collection[str], size: float) -> float:
        near, far = self.group(mesh_axes)
        return (1 - 1 / (near * far)) * size

    def send(self, mesh_axis: str, size: float) -> float:
        return size


def explained(
    shards: Shards, target: Target, bandwidths: Bandwidths | None = None, saved_every: int | None = None
) -> Seconds:
    """A step as `seconds` predicts it, each line with what it is made of.

    The same formulas are evaluated with links that count bytes, and with links without latency: what a line has less of
    then is its latency's.
    """
    own, split = seconds(shards, target, bandwidths, saved_every), shards.split
    rates, mesh = bandwidths or Bandwidths.of(target), dict(split.placement.mesh.shape)
    counting = _Bytes(target, mesh, rates)
    sent = {line.name: line.seconds for line in lines(shards, target, counting)}
    quick = Links(target, mesh, replace(rates, latency=0.0, network_latency=0.0))
    without = {line.name: line.seconds for line in lines(shards, target, quick)}
    moved = dict.fromkeys((ELEMENTWISE, UPDATE), target.chip.bandwidth)
    moved |= dict.fromkeys((HOST, OFFLOADED, INPUT, SAVES), rates.host)

    def made(line: Line) -> Line:
        if line.name in moved:
            size, late = line.seconds * moved[line.name], 0.0
        else:
            size = sent.get(line.name, 0.0) if line.name in COMMUNICATION else 0.0
            late = max(0.0, line.seconds - without.get(line.name, 0.0)) if line.name in COMMUNICATION else 0.0
        return replace(
            line,
            bytes=size,
            latency=late,
            algorithm=_algorithm(line, counting.noted),
            behind=BEHIND.get(line.name, "") if line.hidden else "",
            axes=_axes(split, line.mesh_axes),
        )

    return replace(own, lines=tuple(map(made, own.lines)))


def _algorithm(line: Line, gathers: dict[frozenset[str], str]) -> str:
    """How a line is sent; several names where gathers over some of its mesh axes differ."""
    if line.name not in COMMUNICATION:
        return ""
    found = (name for axes, name in gathers.items() if axes <= set(line.mesh_axes))
    return DIRECT.get(line.name) or ", ".join(dict.fromkeys(found))


def _axes(split: Split, mesh_axes: Collection[str]) -> tuple[str, ...]:
    """The model's axes that mesh axes split, of activations or of parameters."""
    specs = [spec for period in split.work.periods for spec in period.matrices.values()] + [*split.work.outer.values()]
    names = dict.fromkeys(["batch", "seq", "layers", *(name for spec in specs for name in spec.own)])
    rows = split.placement.mesh_axes
    return tuple(n for n in names if {*rows(n), *rows(n, "params")} & {*mesh_axes})
