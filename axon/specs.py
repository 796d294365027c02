"""Arithmetic on `PartitionSpec`s: which mesh axes split an array's dimensions, and over which a sum is still owed."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from axon.patterns import Names


def entries(entry: Any) -> Names:
    """The mesh axes of one entry of a `PartitionSpec`: None, a name, or a tuple of names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def spread(spec: Iterable[Any]) -> Names:
    """All mesh axes that a spec, or its first entries, split an array over."""
    return tuple(a for entry in spec for a in entries(entry))


def less(entry: Any, used: Collection[str]) -> Any:
    """An entry of a `PartitionSpec` without the mesh axes `used`."""
    left = tuple(a for a in entries(entry) if a not in used)
    return None if not left else left[0] if len(left) == 1 else left


def ways(mesh_axes: Iterable[str]) -> int:
    """How many parts these mesh axes make."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in mesh_axes)


def partial_spec(spec: PartitionSpec, mesh_axes: Collection[str]) -> PartitionSpec:
    """`spec` of an array whose true value is the sum over `mesh_axes` of what the devices hold."""
    return PartitionSpec(*spec, unreduced=frozenset(mesh_axes)) if mesh_axes else spec


def split_by(held: PartitionSpec, wanted: PartitionSpec, ways: Sequence[str]) -> tuple[int, Names] | None:
    """(dimension, mesh axes) by which `held` is split further than `wanted`, if that is all and they are `ways`."""
    pairs = [(entries(h), entries(w)) for h, w in zip(held.partitions, wanted.partitions, strict=True)]
    further = [(i, h) for i, (h, w) in enumerate(pairs) if h != w]
    if len(further) != 1 or held.unreduced:
        return None
    dimension, axes = further[0]
    kept = pairs[dimension][1]
    extra = axes[len(kept) :]
    return (dimension, extra) if extra and axes[: len(kept)] == kept and set(extra) <= set(ways) else None


def split(spec: PartitionSpec, dimension: int, mesh_axes: Names) -> PartitionSpec:
    """`spec`, with this dimension split over `mesh_axes` too."""
    parts = ((*entries(e), *mesh_axes) if i == dimension else e for i, e in enumerate(spec.partitions))
    return PartitionSpec(*(less(e, set()) for e in parts))
