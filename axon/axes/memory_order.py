"""The order of an array's dimensions in memory: JAX's interface to it is experimental (jax 0.10.2 to 0.12)."""

from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint


def row_major(x: Array) -> Array:
    """`x`, its last dimension fastest."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
