"""The order of an array's dimensions in memory: JAX's interface to it is experimental (jax 0.10.2 to 0.12)."""

from typing import Any

import jax
from jax import Array
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.sharding import Sharding

from axon.axes.scope import platform


def row_major(x: Array) -> Array:
    """`x`, its last dimension fastest. XLA for accelerators gives each array an order of its own; for CPUs it is always
    this one."""
    return x if platform() == "cpu" else with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def row_major_in_training(x: Array) -> Array:
    """`x`; where a gradient is taken through it, `row_major`, and its cotangent so too. A program that takes none stays
    free to be exported: `jax.export` refuses a layout's constraint, which has no guarantee of compatibility."""
    return x if platform() == "cpu" else _row_major_in_training(x)


@jax.custom_vjp
def _row_major_in_training(x: Array) -> Array:
    return x


_row_major_in_training.defvjp(lambda x: (row_major(x), None), lambda _, cotangent: (row_major(cotangent),))


def ordered(sharding: Sharding, order: tuple[int, ...]) -> Any:
    """A place for an array whose dimensions lie in this order in memory, the last fastest: for `jax.device_put`, or as
    the `sharding` of a `jax.ShapeDtypeStruct`."""
    return Format(Layout(order), sharding)
