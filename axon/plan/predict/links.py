"""Seconds of collectives along mesh axes: by the links that the axes run over.

Ring formulas (Thakur et al. 2005); across hosts of GPUs, and slices of TPUs, hierarchical: each device sends its part
over the network to those that are as it is elsewhere, while the devices of a host complete the parts among themselves.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from axon.chips.target import Target
from axon.errors import UserError, suggest
from axon.foreign_json import number, read_field, read_json

SHARE_OF_LINK = 0.9
"""How much of a link's bandwidth on paper a large message has (TPUs: 90 of 100 GB/s; NCCL's bus bandwidth is alike)."""

LATENCY = {"tpu": 1e-6, "gpu": 5e-6, "cpu": 2e-4}
"""Seconds of one step of a collective within a slice or a host."""

NETWORK_LATENCY = 1.5e-5
"""Seconds of one step across a network."""

HOST = {"tpu": 1.3e10, "gpu": 5.5e10, "cpu": math.inf}
"""Bytes/s one way between a device and its host: some 85 % of 16 lanes of PCIe 3.0 and 5.0 on paper (15.75, 63 GB/s).
An assumption: TPUs' is not published, and an A100 has half of a GPU's here. `--links` has what was measured."""

RATE, TIME = number("(0, inf)"), number("[0, inf)")


@dataclass(frozen=True)
class Bandwidths:
    """What a device reaches with large messages, bytes/s, and the seconds of one step of a collective.

    Args:
        link: over one link of a torus one way, or from one device to all others of its host. network: to other hosts,
            or other slices. host: to the host's memory. latency: within a host or slice. network_latency: across the
            network.
    """

    link: float
    network: float
    host: float
    latency: float
    network_latency: float

    @classmethod
    def of(cls, target: Target) -> "Bandwidths":
        """By the table of chips."""
        link, network = (SHARE_OF_LINK * (one or math.inf) for one in (target.chip.link, target.chip.network))
        return cls(link, network, HOST[target.platform], LATENCY[target.platform], NETWORK_LATENCY)

    @classmethod
    def read(cls, path: Path, target: Target) -> "Bandwidths":
        """Links of a JSON object with fields of this class, as they were measured; of the others the table's.

        Raises `UserError` for a file that is none, for another field, and for a number out of range.
        """
        where, content = f"{path} (--links)", read_json(path)
        kinds = {"link": RATE, "network": RATE, "host": RATE, "latency": TIME, "network_latency": TIME}
        for name in content:
            if name not in kinds:
                raise UserError(f"{where}: unknown field {name!r}.{suggest(name, kinds)}")
        measured = {name: float(read_field(where, content, name, kinds[name])) for name in content}
        return replace(cls.of(target), **measured)


@dataclass(frozen=True)
class Links:
    """The links of `target` under a mesh of devices, `mesh`: axis → size, the last axis between nearest neighbours."""

    target: Target
    mesh: Mapping[str, int]
    bandwidths: Bandwidths

    def gather(self, mesh_axes: Collection[str], size: float) -> float:
        """Seconds in which every device gets an array of `size` bytes of which it has a part, by the fastest algorithm.
        A reduce-scatter of such an array takes as long."""
        near, far = self.group(mesh_axes)
        if near * far == 1 or not size:
            return 0.0
        return self._inside(near, size) if far == 1 else min(self.algorithms(mesh_axes, size).values())

    def algorithm(self, mesh_axes: Collection[str], size: float) -> str:
        """The fastest algorithm of such a gather, by which `gather` takes."""
        found = self.algorithms(mesh_axes, size)
        return min(found, key=lambda name: found[name])

    def algorithms(self, mesh_axes: Collection[str], size: float) -> dict[str, float]:
        """Seconds of such a gather by each algorithm: a ring through all devices; recursive doubling, within hosts and
        then across (a tree); and the hierarchical one. Within a slice of a torus there are rings alone."""
        (near, far), one = self.group(mesh_axes), self.bandwidths
        count, rate = near * far, self._near_bandwidth(near)
        if self.target.chip.torus and far == 1:
            return {"ring": self._inside(near, size)}
        slowest = rate if far == 1 else min(rate, near * one.network)  # each device of a host has a card of its own
        steps = (count - far) * one.latency + (far > 1) * far * one.network_latency
        ring = (count - 1) / count * size / slowest + steps
        if far == 1:
            return {"ring": ring, "tree": self._inside(near, size)}
        steps = self._steps(near) * one.latency + math.log2(far) * one.network_latency
        tree = (near - 1) / count * size / rate + (far - 1) / far * size / one.network + steps
        across = (far - 1) / far * size / near / one.network + math.log2(far) * one.network_latency
        hierarchical = {"hierarchical": max(self._inside(near, size), across)} if near > 1 else {}
        return {"ring": ring, "tree": tree, **hierarchical}

    def reduce(self, mesh_axes: Collection[str], size: float) -> float:
        """Seconds of an all-reduce of `size` bytes: a reduce-scatter and a gather."""
        return 2 * self.gather(mesh_axes, size)

    def exchange(self, mesh_axes: Collection[str], size: float) -> float:
        """Seconds of an all-to-all in which each device has `size` bytes, a part for each of the others."""
        near, far = self.group(mesh_axes)
        if near * far == 1 or not size:
            return 0.0
        hops = max(1.0, self._side(near) / 4) if self.target.chip.torus else 1.0
        sent = (near - 1) / near * size * hops
        inside = sent / self._near_bandwidth(near) + self.bandwidths.latency if near > 1 else 0.0
        across = (far - 1) / far * size / self.bandwidths.network + self.bandwidths.network_latency if far > 1 else 0.0
        return max(inside, across)

    def send(self, mesh_axis: str, size: float) -> float:
        """Seconds in which each device sends `size` bytes to its neighbour along a mesh axis."""
        if self.mesh.get(mesh_axis, 1) == 1:
            return 0.0
        if self.group((mesh_axis,))[1] > 1:
            return size / self.bandwidths.network + self.bandwidths.network_latency
        return size / self.bandwidths.link + self.bandwidths.latency

    def _inside(self, near: int, size: float) -> float:
        """Seconds of a gather among devices that fast links join."""
        return (near - 1) / near * size / self._near_bandwidth(near) + self._steps(near) * self.bandwidths.latency

    # ---- where mesh axes lie --------------------------------------------------------------------------------------

    def group(self, mesh_axes: Collection[str]) -> tuple[int, int]:
        """How many of the devices along these axes fast links join, and how many such groups there are."""
        stride, near, far = 1, 1, 1
        for axis in reversed(list(self.mesh)):
            size = self.mesh[axis]
            if axis in mesh_axes:
                own = max(1, min(size, self.target.linked // stride))
                near, far = near * own, far * -(-size // own)
            stride *= size
        return near, far

    def _side(self, count: int) -> float:
        """The length of a dimension of the torus along which `count` devices lie."""
        return min(count, math.prod(self.target.shape) ** (1 / self.target.chip.torus))

    def _near_bandwidth(self, count: int) -> float:
        """Bytes/s that a device has to `count` devices that fast links join: two links of each dimension of a torus
        that they fill, and one way along a part of one."""
        chip = self.target.chip
        if not chip.torus or count == 1:
            return self.bandwidths.link
        side = max(2.0, self._side(self.target.devices // self.target.slices))
        dimensions = min(chip.torus, math.log(count) / math.log(side))
        return 2 * self.bandwidths.link * max(0.5, dimensions)

    def _steps(self, count: int) -> float:
        """Steps of a collective, one after the other."""
        if not self.target.chip.torus:
            return math.log2(count) if count > 1 else 0.0
        side = self._side(count)
        return 0.0 if count == 1 else side / 2 * max(1.0, math.log(count) / math.log(max(2.0, side)))
