"""The mean of squares of what runs from layer to layer, taken where that is computed.

XLA for TPUs sums squares in the epilogue of the product whose result they are of. It does so within one iteration of a
loop: the norm with which a layer opens would read again all that the layer before it wrote. `Depth` therefore takes the
mean at the end of each layer, and hands it on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import Array, lax

_taken: ContextVar[tuple[Array, Array] | None] = ContextVar("taken", default=None)
"""An array, and its mean of squares over the last axis."""


def mean_square(x: Array, over: Sequence[int] = (-1,)) -> Array:
    """In float32, over some axes, each of which stays, with size 1."""
    wide, found = x.astype(jnp.float32), _taken.get()
    if found is not None and found[0] is x and tuple(over) == (-1,):
        return _is_mean_square(wide, found[1])
    return jnp.mean(jnp.square(wide), axis=tuple(over), keepdims=True)


def take_mean_square(x: Array) -> Array:
    """`mean_square(x)` to hand on beside `x`: a number, without a gradient."""
    return lax.stop_gradient(mean_square(x))


@contextmanager
def mean_square_taken(x: Array, mean: Array | None) -> Iterator[None]:
    """Within this, `mean` is `mean_square` of this very `x`, over its last axis; None: nothing is known."""
    token = _taken.set(None if mean is None else (x, mean))
    try:
        yield
    finally:
        _taken.reset(token)


@jax.custom_jvp
def _is_mean_square(wide: Array, mean: Array) -> Array:
    """`mean`, with the derivative by `wide` of the mean of squares that it is."""
    return mean


@_is_mean_square.defjvp
def _derivative(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    wide, mean = primals
    return _is_mean_square(wide, mean), 2 * jnp.mean(wide * tangents[0], axis=-1, keepdims=True)
