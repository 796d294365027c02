"""What an array's change of sharding sends over the mesh: collectives, and the bytes of each by its ring's formula."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from axon.axes.patterns import Names
from axon.axes.specs import entries

RINGS = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "all-reduce": 2.0}
"""Kind → how often (n − 1)/n of the array passes over a device's link in a ring of n devices."""


@dataclass(frozen=True)
class Move:
    """One collective. `bytes` are those that each device sends; `mesh_axes`, those whose devices take part together."""

    kind: str
    mesh_axes: Names
    bytes: float


@dataclass(frozen=True)
class ArraySharding:
    """How an array lies on a mesh: the mesh axes of each dimension, and those over which a sum is still to be made."""

    split: tuple[Names, ...]
    unreduced: frozenset[str] = frozenset()

    @classmethod
    def of(cls, spec: PartitionSpec, rank: int) -> "ArraySharding":
        split = tuple(map(entries, spec.partitions))
        return cls(split + ((),) * (rank - len(split)), spec.unreduced)

    @property
    def axes(self) -> frozenset[str]:
        """All mesh axes that split it."""
        return frozenset(axis for axes in self.split for axis in axes)


def sent(kind: str, size: float, num_shards: int) -> float:
    """Bytes that one device of a ring of `num_shards` sends: `size` is that of the array whole in its group.

    Whole is what a gather makes, and what each device has before a reduction, a scatter or an exchange. A permute
    sends it once. (Patarasuk & Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.)
    """
    return RINGS[kind] * size * (num_shards - 1) / num_shards if kind in RINGS else size


def moves(size: float, before: ArraySharding, after: ArraySharding, mesh: Mapping[str, int]) -> list[Move]:
    """The collectives that take an array from one sharding to another, in the order in which least is sent.

    Sums come first, scattered where the result is split further, then what only cuts, then exchanges, then gathers.

    Args:
        size: bytes of the whole array; mesh: mesh axis → its size.
    """
    summed = before.unreduced - after.unreduced
    removed, added = before.axes - after.axes, after.axes - before.axes
    local = size / _num_shards(before.axes, mesh)
    result: list[Move] = []

    def add(kind: str, axes: Sequence[str]) -> None:
        num_shards = _num_shards(axes, mesh)
        if num_shards > 1:
            result.append(Move(kind, tuple(a for a in mesh if a in axes), sent(kind, local, num_shards)))

    for axes in after.split:
        scattered = [a for a in axes if a in added & summed]
        add("reduce-scatter", scattered)
        local /= _num_shards(scattered, mesh)
    add("all-reduce", sorted(summed - added))
    local /= _num_shards(added - summed, mesh)
    add("all-to-all", _exchanged(before, after))
    add("collective-permute", _displaced(before, after))
    for axes in reversed(before.split):
        gathered = [a for a in axes if a in removed]
        local *= _num_shards(gathered, mesh)
        add("all-gather", gathered)
    return result


def _num_shards(axes: Any, mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[a] for a in axes)


def _exchanged(before: ArraySharding, after: ArraySharding) -> list[str]:
    """Mesh axes that split another dimension than before."""
    where = {axis: i for i, axes in enumerate(before.split) for axis in axes}
    return [axis for i, axes in enumerate(after.split) for axis in axes if where.get(axis, i) != i]


def _displaced(before: ArraySharding, after: ArraySharding) -> list[str]:
    """Mesh axes that split the dimension they did, in another order."""
    found: list[str] = []
    for old, new in zip(before.split, after.split, strict=True):
        stay, now = [a for a in old if a in new], [a for a in new if a in old]
        found += [a for a, b in zip(stay, now, strict=True) if a != b]
    return found
