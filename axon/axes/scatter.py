"""Reduce-scatter: a sum over devices of which each keeps its own shard."""

import math

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes.specs import extra_axes


def scatter_sum(x: Array, spec: PartitionSpec) -> Array:
    """`x`, a partial sum on an Explicit mesh, summed over those mesh axes by which `spec` splits it further.

    What else `spec` asks for is left to whoever moves the result on; `x` itself comes back where `spec` only splits
    it over mesh axes over which it is not unreduced.

    The reduce-scatter is written out: a `reshard` becomes an all-reduce and a slice, which the TPU's compiler does
    not take apart and overlap with the product that makes `x` (see `axon.runtime.options`).
    """
    current = jax.typeof(x).sharding.spec
    parts = [extra_axes(old, new) for old, new in zip(current.partitions, spec.partitions, strict=True)]
    summed = {axis for axes in parts for axis in axes or ()}
    if None in parts or not summed or not summed <= current.unreduced:
        return x

    def local(part):
        for dimension, axes in enumerate(parts):
            if axes:
                part = _scattered(part, axes, dimension)
        return part

    result = PartitionSpec(*spec.partitions, unreduced=current.unreduced - summed)
    return jax.shard_map(local, in_specs=current, out_specs=result, check_vma=False)(x)


def _scattered(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    """`x` summed over `mesh_axes`, and of a dimension one of as many parts.

    Of a reduce-scatter by a dimension whose rows are no multiple of 1024 numbers (a head of 128,256 or 32,000 columns)
    XLA for v5p makes an all-reduce and a slice, but not of one by a dimension of its own (libtpu 0.0.50.1). Other rows
    stay as they are: on v5e those by a dimension of their own do not overlap with the product before them.
    """
    before, (size, *after) = x.shape[:dimension], x.shape[dimension:]
    if not after or math.prod(after) % 1024 == 0:
        return lax.psum_scatter(x, mesh_axes, scatter_dimension=dimension, tiled=True)
    parts = lax.axis_size(mesh_axes)
    return lax.psum_scatter(x.reshape(*before, parts, size // parts, *after), mesh_axes, scatter_dimension=dimension)
