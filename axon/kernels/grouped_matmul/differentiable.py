"""A grouped product with its two gradients, from the two sums that an implementation provides."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax import Array

from axon.kernels.dtypes import EIGHT_BITS


class Product(Protocol):
    """`rows inner`, `groups inner columns` → `rows columns`; the weight is `groups columns inner` if transposed."""

    def __call__(self, x: Array, w: Array, sizes: Array, *, transposed: bool) -> Array: ...


class WeightGradient(Protocol):
    """`rows embed`, `rows out` → `groups embed out` in `dtype`, for each group the sum over its rows."""

    def __call__(self, x: Array, dy: Array, sizes: Array, *, dtype: Any) -> Array: ...


def differentiable(product: Product, weight_gradient: WeightGradient) -> Callable[[Array, Array, Array], Array]:
    """Of `x, w, sizes`: dx is a product with the weights transposed, dw a sum of outer products for each group, and
    none for a weight in 8 bits.

    A new closure for each trace: JAX caches traces by the function's identity.
    """

    @jax.custom_vjp
    def grouped(x, w, sizes):
        return product(x, w, sizes, transposed=False)

    def forward(x, w, sizes):
        return product(x, w, sizes, transposed=False), (x, w, sizes)

    def backward(residuals, dy):
        x, w, sizes = residuals
        dx = product(dy, w, sizes, transposed=True)
        return dx, None if w.dtype in EIGHT_BITS else weight_gradient(x, dy, sizes, dtype=w.dtype), None

    grouped.defvjp(forward, backward)
    return grouped
