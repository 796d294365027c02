"""All-gather over a torus in two stages: along its lines, then between them."""

from collections.abc import Callable

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes.patterns import Names
from axon.axes.specs import num_shards, single_split


def gather_in_stages(x: Array, spec: PartitionSpec, line_of: Callable[[Names], int]) -> Array:
    """`x` under `spec`, if that is to gather one dimension over devices that lie in more than a plane of a torus;
    otherwise `x`.

    `line_of(mesh_axes)`: how many devices along these, which follow each other, gather first; then do those that hold
    the same of every line. 1: all at once. What travels is what one all-gather would send. For a gather over a whole
    three-dimensional torus the TPU's compiler writes an all-reduce of zeros and the shard, which sends twice as much
    and fills the zeros in first; over a part of it that takes all three dimensions an all-gather during which the
    TensorCore waits. Of lines and of planes it makes all-gathers beside other work.
    """
    current, mesh = jax.typeof(x).sharding.spec, jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or current.unreduced or current.reduced or spec.unreduced or spec.reduced:
        return x
    found = single_split(current, spec, mesh.axis_names)
    if not found:
        return x
    dimension, mesh_axes = found
    line, size = line_of(mesh_axes), num_shards(mesh_axes)
    if line == 1:
        return x
    lines = [list(range(first, first + line)) for first in range(0, size, line)]
    between = [list(range(first, size, line)) for first in range(line)]

    def local(part: Array) -> Array:
        for of in (lines, between):
            part = lax.all_gather(part, mesh_axes, axis_index_groups=of, axis=dimension, tiled=True)
        return part

    @jax.custom_vjp
    def gathered(x: Array) -> Array:
        return jax.shard_map(local, in_specs=current, out_specs=spec, check_vma=False)(x)

    # As of a `reshard`: every device has the whole cotangent, and takes its shard of it.
    gathered.defvjp(lambda x: (gathered(x), None), lambda _, cotangent: (jax.sharding.reshard(cotangent, current),))
    return gathered(x)
