"""Arrays sent from device to device along mesh axes."""

from collections.abc import Sequence

import jax
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
