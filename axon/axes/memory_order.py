"""The order of an array's dimensions in memory: JAX's interface to it is experimental (jax 0.10.2 to 0.12)."""

from typing import Any

from jax import Array
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import Sharding


def row_major(x: Array) -> Array:
    """`x`, its last dimension fastest."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def ordered(sharding: Sharding, order: tuple[int, ...]) -> Any:
    """A place for an array whose dimensions lie in this order in memory, the last fastest: for `jax.device_put`, or as
    the `sharding` of a `jax.ShapeDtypeStruct`."""
    return Format(Layout(order), sharding)
