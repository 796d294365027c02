"""Reduce-scatter: a sum over devices of which each keeps its own shard.

The TPU compiler turns a reduce-scatter over a mesh axis that spans two dimensions of the torus into an all-reduce of
the whole array and a slice; over one dimension at a time it stays a reduce-scatter (libtpu 0.0.50, v5e, v5p and v6e).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

Stages = Callable[[str], tuple[int, ...]]
"""Mesh axis → the sizes of the stages that a sum over it is done in, the outermost first; their product is its size."""


def scatter_sum(x: Array, spec: PartitionSpec, stages: Stages) -> Array:
    """`x`, a partial sum on an Explicit mesh, summed over those mesh axes by which `spec` splits it further.

    What else `spec` asks for is left to whoever moves the result on; `x` itself comes back where `spec` only splits
    it over mesh axes of which no sum is owed.
    """
    held = jax.typeof(x).sharding.spec
    further = [_further(old, new) for old, new in zip(held.partitions, spec.partitions, strict=True)]
    summed = {axis for axes in further for axis in axes or ()}
    if None in further or not summed or not summed <= held.unreduced:
        return x

    def local(part):
        for dimension, axes in enumerate(further):
            for axis in axes or ():
                part = _scattered(part, axis, dimension, stages(axis))
        return part

    made = PartitionSpec(*spec.partitions, unreduced=held.unreduced - summed)
    return jax.shard_map(local, in_specs=held, out_specs=made, check_vma=False)(x)


def groups(sizes: Sequence[int], stage: int) -> list[list[int]]:
    """Devices of a mesh axis, numbered in mixed radix `sizes`, in groups that differ in digit `stage` only."""
    numbers = range(math.prod(sizes))
    digits = list(itertools.product(*map(range, sizes)))
    others = {number: digits[number][:stage] + digits[number][stage + 1 :] for number in numbers}
    return [[n for n in numbers if others[n] == key] for key in dict.fromkeys(others.values())]


def _scattered(part: Array, axis: str, dimension: int, sizes: tuple[int, ...]) -> Array:
    if len(sizes) == 1:
        return lax.psum_scatter(part, axis, scatter_dimension=dimension, tiled=True)
    for stage in range(len(sizes)):
        together = groups(sizes, stage)
        part = lax.psum_scatter(part, axis, scatter_dimension=dimension, axis_index_groups=together, tiled=True)
    return part


def _further(held: Any, wanted: Any) -> tuple[str, ...] | None:
    """The mesh axes that split a dimension beyond those that already do; None if it is not split like that."""
    old, new = (() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in (held, wanted))
    return new[len(old) :] if new[: len(old)] == old else None
