"""Collective matmul: a gather or a reduction over mesh axes as a ring of permutes, with compute in between.

While a device multiplies the chunk that it holds, the next one travels (Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). These functions run inside a
region in which the mesh axes are manual; names carry no roles.
"""

from collections.abc import Callable, Iterator

import jax.numpy as jnp
from jax import Array, lax

from axon.axes.patterns import Names
from axon.axes.permute import permute

Product = Callable[[Array, Array], Array]


def ring_chunks(chunk: Array, mesh_axes: Names) -> Iterator[tuple[Array, Array]]:
    """(place, chunk) of every device along the mesh axes, one's own first, each sent on before it is used."""
    size, place = lax.axis_size(mesh_axes), lax.axis_index(mesh_axes)
    back = [(i, (i - 1) % size) for i in range(size)]
    for step in range(size):
        coming = permute(chunk, mesh_axes, back) if step < size - 1 else chunk
        yield (place + step) % size, chunk
        chunk = coming


def all_gather_matmul(
    product: Product, a: Array, a_names: Names, b: Array, b_names: Names, out: Names, name: str, mesh_axes: Names
) -> tuple[Array, Array]:
    """The product of `b` with all of `a`, of which each device holds a chunk of axis `name`; and all of `a`."""
    at, size = a_names.index(name), lax.axis_size(mesh_axes)
    whole = _zeros(a, at, size)
    result: Array | None = None
    for place, chunk in ring_chunks(a, mesh_axes):
        first = place * a.shape[at]
        whole = lax.dynamic_update_slice_in_dim(whole, chunk, first, at)
        other = lax.dynamic_slice_in_dim(b, first, a.shape[at], b_names.index(name)) if name in b_names else b
        part = product(chunk, other)
        if name in out:
            row = out.index(name)
            into = _zeros(part, row, size) if result is None else result
            result = lax.dynamic_update_slice_in_dim(into, part, place * part.shape[row], row)
        else:
            result = part if result is None else result + part
    assert result is not None
    return result, whole


def matmul_reduce_scatter(product: Product, a: Array, a_names: Names, b: Array, name: str, mesh_axes: Names) -> Array:
    """The product of `a` and `b` summed over the mesh axes, of which each device keeps its chunk of axis `name`."""
    at, size, place = a_names.index(name), lax.axis_size(mesh_axes), lax.axis_index(mesh_axes)
    length = a.shape[at] // size
    on = [(i, (i + 1) % size) for i in range(size)]
    total: Array | None = None
    for step in range(size):
        chunk = lax.dynamic_slice_in_dim(a, (place - 1 - step) % size * length, length, at)
        part = product(chunk, b)
        total = part if total is None else permute(total, mesh_axes, on) + part
    assert total is not None
    return total


def _zeros(part: Array, dimension: int, times: int) -> Array:
    shape = [n * times if i == dimension else n for i, n in enumerate(part.shape)]
    return jnp.zeros(shape, part.dtype)
