"""The product of two operands in 8 bits as that of two matrices, for `axon.kernels.quantized_matmul`."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from axon.axes import Names
from axon.kernels.dtypes import EIGHT_BITS
from axon.kernels.quantized_matmul import KMajor, Quantized, dequantize, quantized_matmul
from axon.kernels.quantized_matmul.quantize import spread


def fits(a: Quantized, a_names: Names, b: Quantized, b_names: Names, out: Names) -> bool:
    """Whether there is such a product: of one dtype that the kernels know, and without an axis that both have and that
    is not summed."""
    alike = a.values.dtype == b.values.dtype and a.values.dtype in EIGHT_BITS
    return alike and not set(a_names) & set(b_names) & set(out)


def product(a: Quantized, a_names: Names, b: Quantized, b_names: Names, out: Names, dtype: Any) -> Array:
    """The sum over all that is not in `out`, with the axes `out`, in `dtype`, of operands that fit."""
    summed = tuple(name for name in a_names if name in b_names)
    sizes = dict(zip((*a_names, *b_names), (*a.values.shape, *b.values.shape), strict=True))
    sides = []
    for operand, names in ((a, a_names), (b, b_names)):
        kept = tuple(name for name in out if name in names)
        sides.append((kept, matrix(operand, names, kept, summed)))
    if is_finer(sides[0][1], sides[1][1]):
        sides.reverse()
    (of_rows, left), (of_columns, right) = sides
    y = (
        _product_in_bfloat16(left, right, dtype)
        if _by_row_and_block(left, right)
        else quantized_matmul(left, KMajor(*right), dtype=dtype)
    )
    names = (*of_rows, *of_columns)
    return jnp.transpose(y.reshape([sizes[name] for name in names]), [names.index(name) for name in out])


def _by_row_and_block(left: Quantized, right: Quantized) -> bool:
    """Whether each row of both has scales that change along what is summed, which no kernel takes: XLA would multiply
    block after block (an H200 then trains at a third of bfloat16's speed)."""
    return right.scales.shape[0] == right.values.shape[0] and min(x.scales.shape[1] for x in (left, right)) > 1


def _product_in_bfloat16(left: Quantized, right: Quantized, dtype: Any) -> Array:
    """The product of what both stand for, rounded to bfloat16: to 2^-9, where 8 bits were rounded to 2^-4."""
    a, b = (dequantize(x).astype(jnp.bfloat16) for x in (left, right))
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(dtype)


def is_finer(a: Quantized, b: Quantized) -> bool:
    """Whether scales of `b` that change along what is summed are more than those of `a`: kernels take them on the left,
    where each row may have its own."""
    return b.scales.shape[1] > 1 and b.scales.size > a.scales.size


def matrix(operand: Quantized, names: Names, kept: Names, summed: Names) -> Quantized:
    """An operand as a matrix, `kept summed`; scales whose blocks are not even there come as often as makes them so."""
    order = [names.index(name) for name in (*kept, *summed)]
    values, scales = (jnp.transpose(x, order) for x in operand)
    cut, shape, counts = len(kept), values.shape, scales.shape
    even = (*_even(counts[:cut], shape[:cut]), *_even(counts[cut:], shape[cut:]))
    return Quantized(*(x.reshape(math.prod(x.shape[:cut]), -1) for x in (values, spread(scales, *even))))


def _even(counts: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """How many scales each of some neighbouring axes has when one number counts the blocks of all: before the last with
    more than one, all that there can be."""
    last = max((i for i, count in enumerate(counts) if count > 1), default=0)
    return (*sizes[:last], *counts[last:])
