"""Functions of whole sequences, wherever a layout stores their positions."""

from collections.abc import Callable

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes.placing import reshard
from axon.axes.scope import current


def over_positions(fn: Callable[[Array], Array], x: Array) -> Array:
    """`fn` of `x[batch seq …]`, each device with its sequences whole, in the order of their positions.

    The result, `batch seq …` too, is whole on each device, in the order in which the layout stores positions.
    """
    scope = current()
    if scope is None:
        return fn(x)
    whole = reshard(x, PartitionSpec(*scope.placement.spec(("batch",)), *[None] * (x.ndim - 1)))
    order = scope.placement.stored_positions(x.shape[1])
    if np.array_equal(order, np.arange(x.shape[1])):
        return fn(whole)
    return fn(whole[:, np.argsort(order)])[:, order]
