"""All-gather over every device of a mesh in two stages: along the lines of the torus, then between them."""

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes.specs import num_shards, single_split


def gather_in_stages(x: Array, spec: PartitionSpec, line: int) -> Array:
    """`x` under `spec`, if that is to gather a dimension that is split over all devices of the mesh; otherwise `x`.

    `line` devices that follow each other in the mesh gather first, then those that hold the same of every line. What
    travels is what one all-gather would send. For a gather over a whole three-dimensional torus the TPU's compiler
    writes an all-reduce of zeros and the shard, which sends twice as much and fills the zeros in first; of a part of
    the torus it makes an all-gather.
    """
    current, mesh = jax.typeof(x).sharding.spec, jax.sharding.get_abstract_mesh()
    if line == 1 or mesh.manual_axes or current.unreduced or current.reduced or spec.unreduced or spec.reduced:
        return x
    found = single_split(current, spec, mesh.axis_names)
    if not found:
        return x
    dimension, mesh_axes = found
    if num_shards(mesh_axes) != mesh.size:
        return x
    lines = [list(range(first, first + line)) for first in range(0, mesh.size, line)]
    between = [list(range(first, mesh.size, line)) for first in range(line)]

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
