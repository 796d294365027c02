"""Computations over whole sequences, each on its device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes.placing import per_device, reshard
from axon.axes.scope import current


def by_sequence(fn: Callable[..., Any], *arrays: Array) -> Any:
    """`fn` of arrays `batch …`, run by each device on its own sequences, which are whole there, in the order in which
    the layout stores positions. So are those of the result, a tree of arrays `batch …`."""
    scope = current()
    if scope is None:
        return fn(*arrays)
    whole = PartitionSpec(*scope.placement.spec(("batch",)))
    specs = tuple(PartitionSpec(*whole, *[None] * (x.ndim - 1)) for x in arrays)
    shapes = jax.eval_shape(fn, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    results = jax.tree.map(lambda x: PartitionSpec(*whole, *[None] * (x.ndim - 1)), shapes)
    return per_device(fn, specs, results)(*map(reshard, arrays, specs))


def at_places(x: Array, places: Array) -> Array:
    """`batch places …` of `x[batch seq …]`, at the indices `places[batch places]`, as of `by_sequence`."""

    def local(x: Array, places: Array) -> Array:
        return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)

    return by_sequence(local, x, places)
