"""Grouped matmul: each group of rows by a weight of its own, as for experts, by the implementation that fits."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.errors import UserError
from axon.kernels.choice import choose, off_gpu, with_gpu, with_tpu
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.grouped_matmul import gpu_support, tpu, tpu_gradient, tpu_product, xla
from axon.kernels.grouped_matmul.differentiable import Product, WeightGradient
from axon.kernels.grouped_matmul.reference import grouped_matmul_reference
from axon.kernels.grouped_matmul.tpu import grouped_matmul_tpu
from axon.kernels.grouped_matmul.xla import grouped_matmul_xla

__all__ = [
    "decoding_grouped_product",
    "grouped_matmul",
    "grouped_matmul_gradients",
    "grouped_matmul_reference",
    "grouped_matmul_tpu",
    "grouped_matmul_xla",
    "grouped_product",
    "grouped_weight_gradient",
]

_IMPLEMENTATIONS = {
    "tpu": grouped_matmul_tpu,
    "xla": grouped_matmul_xla,
    "reference": grouped_matmul_reference,
    "mosaic": lambda x, w, sizes: _mosaic().grouped_matmul_gpu(x, w, sizes),
}
_OF_MORE = {"tpu": partial(tpu_product.product, transposed=False), "xla": partial(xla.product, transposed=False)}
"""Those that find a group's weight among more than the groups have."""


def grouped_matmul(x: Array, w: Array, sizes: Array, first: Array | None = None) -> Array:
    """The dropless product of a mixture of experts (MegaBlocks, Gale et al., arXiv:2211.15841), on one device's shard.

    Args:
        x: `rows embed`, sorted by group: first the rows of group 0, then those of group 1, …
        w: `groups embed out`, in the dtype of `x`; or int8 or float8_e4m3fn, converted as it is read: such a weight is
            not trained, and gets no gradient.
        sizes: `groups`, int32: how many rows each group has; any may be 0. Their sum is at most `rows`.
        first: int32, of weights `more embed out` the number of group 0's, which those of the others follow: they are
            read where they are. Such weights are not trained.

    Returns: `rows out`, in the dtype of `x`, summed in float32. Rows past the sum of `sizes` may hold anything, give
    zeros and get zero gradients, as does the weight of an empty group.

    Raises `UserError` for shapes or dtypes that do not match.
    """
    _check(x, w, sizes, several=first is not None)
    chosen = _chosen(x, w, sizes)
    if first is None:
        return _IMPLEMENTATIONS[chosen](x, w, sizes)
    if chosen in _OF_MORE:
        return _OF_MORE[chosen](x, w, sizes, first=first)
    return _IMPLEMENTATIONS[chosen](x, lax.dynamic_slice_in_dim(w, first, sizes.shape[0]), sizes)


def grouped_matmul_gradients(
    x: Array, w: Array, sizes: Array, dy: Array, accumulate: Any, *, swapped: bool = False
) -> tuple[Array, Array]:
    """`dx` and `dw` of `grouped_matmul` from its cotangent `dy`: that of the weights in the dtype `accumulate`.

    Args:
        swapped: make `dw` as `groups out embed`.
    """
    _check(x, w, sizes)
    products = _products(_chosen(x, w, sizes))
    if products is None:
        _, backward = jax.vjp(lambda x, w: grouped_matmul_reference(x, w, sizes), x, w.astype(accumulate))
        dx, dw = backward(dy.astype(accumulate))
        return dx, jnp.swapaxes(dw, 1, 2) if swapped else dw
    product, weight_gradient = products
    left, right = (dy, x) if swapped else (x, dy)
    return product(dy, w, sizes, transposed=True), weight_gradient(left, right, sizes, dtype=accumulate)


def grouped_product(x: Array, w: Array, sizes: Array, *, transposed: bool) -> Array:
    """`rows columns`, float32: `x[rows inner]` by `w[groups inner columns]`, or by `w[groups columns inner]` where
    `transposed`; both in 8 bits (int8, e4m3, e5m2), or in float32, summed in 32 bits. Rows of no group are 0.

    It has no gradient.
    """
    _choose_xla("it multiplies no two operands in 8 bits", x, sizes, w.dtype.name)
    return xla.product(x, w, sizes, transposed=transposed, dtype=jnp.float32)


def decoding_grouped_product(
    x: Array,
    parts: Sequence[Array],
    decode: Callable[..., Array],
    sizes: Array,
    first: Array | int = 0,
    *,
    transposed: bool,
) -> Array:
    """`rows columns` in the dtype of `x`: `x[rows inner]` by the weights `inner columns`, or `columns inner` where
    `transposed`, that `decode` gives of each group's `parts[group …]`. Rows of no group are 0.

    A group's weight is decoded where its rows are multiplied, and dropped: never are those of all groups there at once.

    Args:
        first: the number of group 0's in the first of the parts, which may have those of more groups.

    It has no gradient.
    """
    _choose_xla("it decodes no weights", x, sizes, "a decoded weight")

    def weight(group: Array) -> Array:
        codes, *others = parts
        return decode(codes[first + group], *(part[group] for part in others)).astype(x.dtype)

    columns = jax.eval_shape(weight, jnp.zeros((), jnp.int32)).shape[0 if transposed else 1]
    return xla.product_by_group(x, weight, sizes, columns, transposed=transposed)


def grouped_weight_gradient(x: Array, dy: Array, sizes: Array) -> Array:
    """`groups embed out`, float32: of each group the sum of `x[rows embed]` times `dy[rows out]`, of dtypes as of
    `grouped_product`. It has no gradient."""
    _choose_xla("it multiplies no two operands in 8 bits", x, sizes, dy.dtype.name)
    return xla.weight_gradient(x, dy, sizes, dtype=jnp.float32)


def _choose_xla(why: str, x: Array, sizes: Array, by: str) -> None:
    """A word in the log, of a product that plain XLA alone makes; `why` no kernel does."""
    candidates = with_gpu({"mosaic": why}, with_tpu(why, {"xla": None}))
    choose("grouped_matmul", candidates, f"{x.shape[0]} rows in {sizes.shape[0]} groups, {x.dtype} by {by}")


def _products(chosen: str) -> tuple[Product, WeightGradient] | None:
    """An implementation's product and weights' gradient; None for the reference, which JAX differentiates."""
    if chosen == "mosaic":
        return _mosaic().product, _mosaic().weight_gradient
    return {
        "tpu": (tpu_product.product, tpu_gradient.weight_gradient),
        "xla": (xla.product, xla.weight_gradient),
    }.get(chosen)


def _mosaic() -> Any:
    """The Hopper kernels, imported where they run."""
    return import_module("axon.kernels.grouped_matmul.gpu")


def _chosen(x: Array, w: Array, sizes: Array) -> str:
    others = with_tpu(tpu.unfit(x, w), {"xla": _xla_unfit(x), "reference": None})
    candidates = with_gpu({"mosaic": _without_mosaic(x, w)}, others)
    _, embed, out = w.shape
    stored = "" if w.dtype == x.dtype else f" by {w.dtype}"
    detail = f"{x.shape[0]} rows of {embed} by {out} in {sizes.shape[0]} groups, {x.dtype}{stored}"
    return choose("grouped_matmul", candidates, detail)


def _xla_unfit(x: Array) -> str | None:
    return None if x.shape[0] else "there are no rows"


def _without_mosaic(x: Array, w: Array) -> str | None:
    """Why the Hopper kernels cannot do this product; None if they can."""
    return off_gpu(lambda chip: gpu_support.unsupported(x, w, chip))


def _check(x: Array, w: Array, sizes: Array, several: bool = False) -> None:
    shapes = f"x {x.shape}, w {w.shape}, sizes {sizes.shape}"
    if (x.ndim, w.ndim, sizes.ndim) != (2, 3, 1):
        raise UserError(f"grouped_matmul needs x[rows, embed], w[groups, embed, out] and sizes[groups], not {shapes}")
    if x.shape[1] != w.shape[1]:
        raise UserError(f"grouped_matmul: x has an embed of {x.shape[1]}, w of {w.shape[1]} ({shapes})")
    groups, weights = sizes.shape[0], w.shape[0]
    if not groups or groups > weights or (groups < weights and not several):
        raise UserError(f"grouped_matmul: w has {weights} groups and there are {groups} sizes ({shapes})")
    if sizes.dtype != jnp.int32:
        raise UserError(f"grouped_matmul: sizes are int32, not {sizes.dtype}")
    if not jnp.issubdtype(x.dtype, jnp.floating) or w.dtype not in (x.dtype, *EIGHT_BITS):
        names = " or ".join(jnp.dtype(dtype).name for dtype in EIGHT_BITS)
        raise UserError(
            f"grouped_matmul: x and w have one floating dtype, or w is {names}, not {x.dtype} and {w.dtype}"
        )
