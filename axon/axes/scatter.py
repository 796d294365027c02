"""Reduce-scatter: a sum over devices of which each keeps its own shard."""

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes.specs import extra_axes


def scatter_sum(x: Array, spec: PartitionSpec, tiled: bool) -> Array:
    """`x`, a partial sum on an Explicit mesh, summed over those mesh axes by which `spec` splits it further.

    What else `spec` asks for is left to whoever moves the result on; `x` itself comes back where `spec` only splits
    it over mesh axes over which it is not unreduced.

    The reduce-scatter is written out: a `reshard` becomes an all-reduce and a slice, which the TPU's compiler does
    not take apart and overlap with the product that makes `x` (see `axon.chips`). `tiled`: by a dimension of which each
    device keeps a part; else a matrix is scattered by a dimension of its own, of as many as there are devices: of
    others XLA for v5p makes an all-reduce and a slice where they are large (a head with 128,256 or 32,000 columns; most
    weights over 2,048 of 4,096 devices). Stacks of matrices, as experts are, it would copy for that (libtpu 0.0.50.1).
    """
    current = jax.typeof(x).sharding.spec
    parts = [extra_axes(old, new) for old, new in zip(current.partitions, spec.partitions, strict=True)]
    summed = {axis for axes in parts for axis in axes or ()}
    if None in parts or not summed or not summed <= current.unreduced:
        return x
    scattered = _tiled if tiled or x.ndim != 2 else _untiled

    def local(part):
        for dimension, axes in enumerate(parts):
            if axes:
                part = scattered(part, axes, dimension)
        return part

    result = PartitionSpec(*spec.partitions, unreduced=current.unreduced - summed)
    return jax.shard_map(local, in_specs=current, out_specs=result, check_vma=False)(x)


def _tiled(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    return lax.psum_scatter(x, mesh_axes, scatter_dimension=dimension, tiled=True)


def _untiled(x: Array, mesh_axes: tuple[str, ...], dimension: int) -> Array:
    before, (size, *after) = x.shape[:dimension], x.shape[dimension:]
    parts = lax.axis_size(mesh_axes)
    return lax.psum_scatter(x.reshape(*before, parts, size // parts, *after), mesh_axes, scatter_dimension=dimension)
