"""Arrays sent from device to device along mesh axes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon.axes.patterns import Names


def permute(x: Array, mesh_axes: Names, pairs: Sequence[tuple[int, int]]) -> Array:
    """`x` sent from device to device along the mesh axes, by pairs (source, destination); zeros where none arrives.

    A device's number is `lax.axis_index(mesh_axes)`, in whatever order the axes are given: `lax.ppermute` takes them in
    the mesh's order alone.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ordered = tuple(sorted(mesh_axes, key=mesh.axis_names.index))
    if ordered == tuple(mesh_axes):
        return lax.ppermute(x, ordered, pairs)
    numbers = np.arange(lax.axis_size(mesh_axes)).reshape([mesh.shape[name] for name in mesh_axes])
    in_mesh = np.argsort(numbers.transpose([mesh_axes.index(name) for name in ordered]).ravel())
    return lax.ppermute(x, ordered, [(int(in_mesh[source]), int(in_mesh[to])) for source, to in pairs])


def permute_or_keep(x: Array, mesh_axes: Names, pairs: Sequence[tuple[int, int]]) -> Array:
    """`permute`, in which a device that sends to itself keeps its own and sends nothing."""
    sent = [pair for pair in pairs if pair[0] != pair[1]]
    arriving = permute(x, mesh_axes, sent) if sent else jnp.zeros_like(x)
    kept = [source for source, to in pairs if source == to]
    if not kept:
        return arriving
    own = jnp.isin(lax.axis_index(mesh_axes), np.array(kept))
    return arriving + jnp.where(own, x, jnp.zeros((), x.dtype))
