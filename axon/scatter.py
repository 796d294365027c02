"""Reduce-scatter: a sum over devices of which each keeps its own shard."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.gather import Groups, stages
from axon.patterns import Names
from axon.specs import further


def scatter_sum(x: Array, spec: PartitionSpec, line: int = 1) -> Array:
    """`x`, a partial sum on an Explicit mesh, summed over those mesh axes by which `spec` splits it further.

    What else `spec` asks for is left to whoever moves the result on; `x` itself comes back where `spec` only splits
    it over mesh axes of which no sum is owed.

    Over all devices of a torus whose lines have `line` devices it goes in two stages, between the lines first, so that
    the second has less to send: see `axon.gather`.

    The reduce-scatter is said outright: a `reshard` becomes an all-reduce and a slice, which the TPU's compiler does
    not take apart and overlap with the product that makes `x` (see `axon.compiler`).
    """
    held = jax.typeof(x).sharding.spec
    parts = [further(old, new) for old, new in zip(held.partitions, spec.partitions, strict=True)]
    summed = {axis for axes in parts for axis in axes or ()}
    if None in parts or not summed or not summed <= held.unreduced:
        return x

    def local(part):
        for dimension, axes in enumerate(parts):
            if axes:
                part = _scattered(part, dimension, axes, stages(axes, line))
        return part

    made = PartitionSpec(*spec.partitions, unreduced=held.unreduced - summed)
    return jax.shard_map(local, in_specs=held, out_specs=made, check_vma=False)(x)


def _scattered(part: Array, dimension: int, mesh_axes: Names, groups: list[Groups | None]) -> Array:
    """One stage is a sum over all devices of `mesh_axes`; of two, in `groups`, the second of them comes first."""
    if len(groups) == 1:
        return lax.psum_scatter(part, mesh_axes, scatter_dimension=dimension, tiled=True)
    # Of what lies innermost in memory the compiler would make an all-reduce; the product writes it outermost as well.
    part = jnp.moveaxis(part, dimension, 0)
    for of in reversed(groups):
        part = lax.psum_scatter(part, mesh_axes, scatter_dimension=0, axis_index_groups=of, tiled=True)
    return jnp.moveaxis(part, 0, dimension)
