"""Arithmetic on `PartitionSpec`s: which mesh axes split an array's dimensions, and over which it is unreduced."""

import math
from collections.abc import Collection, Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axon.axes.patterns import Names


def entries(entry: Any) -> Names:
    """The mesh axes of one entry of a `PartitionSpec`: None, a name, or a tuple of names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def mesh_axes_of(spec: Iterable[Any]) -> Names:
    """All mesh axes that a spec, or its first entries, split an array over."""
    return tuple(a for entry in spec for a in entries(entry))


def without(entry: Any, used: Collection[str]) -> Any:
    """An entry of a `PartitionSpec` without the mesh axes `used`."""
    left = tuple(a for a in entries(entry) if a not in used)
    return None if not left else left[0] if len(left) == 1 else left


def num_shards(mesh_axes: Iterable[str]) -> int:
    """How many parts these mesh axes make."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in mesh_axes)


def partial_spec(spec: PartitionSpec, mesh_axes: Collection[str]) -> PartitionSpec:
    """`spec` of an array whose true value is the sum over `mesh_axes` of what the devices hold."""
    return PartitionSpec(*spec, unreduced=frozenset(mesh_axes)) if mesh_axes else spec


def extra_axes(current: Any, wanted: Any) -> Names | None:
    """The mesh axes by which the entry `wanted` splits a dimension beyond those of `current`; None if not like that."""
    old, new = entries(current), entries(wanted)
    return new[len(old) :] if new[: len(old)] == old else None


def single_split(current: PartitionSpec, wanted: PartitionSpec, among: Collection[str]) -> tuple[int, Names] | None:
    """(dimension, mesh axes) by which `current` is split further than `wanted`, if that is all and they are `among`."""
    parts = [extra_axes(w, h) for h, w in zip(current.partitions, wanted.partitions, strict=True)]
    found = [(dimension, axes) for dimension, axes in enumerate(parts) if axes != ()]
    if len(found) != 1 or current.unreduced:
        return None
    dimension, axes = found[0]
    return (dimension, axes) if axes and set(axes) <= set(among) else None


def of_rank(spec: PartitionSpec, rank: int) -> PartitionSpec:
    """`spec` with an entry for each dimension; those that it leaves out are not split."""
    rest = (None,) * (rank - len(spec.partitions))
    return PartitionSpec(*spec.partitions, *rest, unreduced=spec.unreduced, reduced=spec.reduced)


def split(spec: PartitionSpec, dimension: int, mesh_axes: Names) -> PartitionSpec:
    """`spec`, with this dimension split over `mesh_axes` too."""
    parts = ((*entries(e), *mesh_axes) if i == dimension else e for i, e in enumerate(spec.partitions))
    return PartitionSpec(*(without(e, set()) for e in parts))
