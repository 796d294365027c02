"""The order of an array's dimensions in memory: JAX's interface to it is experimental (jax 0.10.2 to 0.12)."""

from typing import Any

from jax import Array
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import Sharding

from axon.axes.scope import current


def row_major(x: Array) -> Array:
    """`x`, its last dimension fastest, and its cotangent so too. XLA for accelerators gives each array an order of its
    own; for CPUs it is always this one."""
    scope = current()
    on_cpu = scope is None or scope.placement.platform == "cpu"
    return x if on_cpu else with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def ordered(sharding: Sharding, order: tuple[int, ...]) -> Any:
    """A place for an array whose dimensions lie in this order in memory, the last fastest: for `jax.device_put`, or as
    the `sharding` of a `jax.ShapeDtypeStruct`."""
    return Format(Layout(order), sharding)
