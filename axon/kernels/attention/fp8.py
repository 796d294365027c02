"""Operands of attention's products in e4m3 (FlashAttention-3, Shah et al., arXiv:2407.08608, section 3.3).

Queries and keys are mixed by one Hadamard matrix over head_dim, which leaves q·k as it is and spreads an outlier over
its row. Blocks of 128 queries and of 256 keys or values, of one head of one sequence, have a scale each. Weights are
powers of two below a *whole* number, rounded times 2⁸: what one is rounded to depends on no key that came before.

The forward alone: the backward has its products in the dtype of the operands, of operands that are not rounded.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from axon.axes import MAX
from axon.kernels.hadamard import SIGNS, mixed
from axon.kernels.quantized_matmul.quantize import Quantized, rounded

E4M3 = jnp.float8_e4m3fn

MOST = float(jnp.finfo(E4M3).max)

PRODUCTS = "fp8 in attention"
"""The products that a chip must have, as `axon.chips.Chip.products` calls them."""

QUERIES = 128
"""Queries of a head that share a scale."""

KEYS = 256
"""Keys, and values, of a head that share a scale: what a matrix unit sums over at once on TPU7x."""


@dataclass(frozen=True)
class FP8Products:
    """Both products of the forward are of e4m3 operands; `emulate`: rounded alike, and multiplied in float32."""

    emulate: bool = False

    def __str__(self) -> str:
        return "FP8" + (", emulated" if self.emulate else "")


def quantized_operands(q: Array, k: Array, v: Array) -> tuple[Quantized, Quantized, Quantized]:
    """`… seq head_dim` each, of any axes before: values in e4m3, and scales `… blocks`."""
    q, k = (mixed(x, _block(x.shape[-1])) for x in (q, k))
    return _rounded_rows(q, QUERIES), _rounded_rows(k, KEYS), _rounded_rows(v, KEYS)


def emulated_operands(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
    """The numbers that `quantized_operands` stand for, float32."""
    operands = zip(quantized_operands(q, k, v), (QUERIES, KEYS, KEYS), strict=True)
    return tuple(x.values.astype(jnp.float32) * _spread(x, rows) for x, rows in operands)


def whole(top: Array) -> Array:
    """The exponent below which weights are powers, of a row's greatest score in base 2: the least whole number that is
    no less, and 8 off it, so that weights are at most 2⁸."""
    return jnp.ceil(top) - 8


def _block(width: int) -> int:
    """The greatest power of two that divides head_dim, and has signs."""
    return min(width & -width, len(SIGNS))


def _rounded_rows(x: Array, rows: int) -> Quantized:
    """Not a number where a block has one that is not finite."""
    length = x.shape[-2]
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -length % rows), (0, 0)]
    blocks = jnp.pad(x.astype(jnp.float32), padding).reshape(*x.shape[:-2], -1, rows, x.shape[-1])
    largest = MAX.over(jnp.abs(blocks), axis=(-2, -1))
    scales = jnp.maximum(largest * (1 / MOST), jnp.finfo(jnp.float32).tiny)
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    values = rounded(blocks * (1 / scales)[..., None, None], E4M3)
    return Quantized(values.reshape(*x.shape[:-2], -1, x.shape[-1])[..., :length, :], scales)


def _spread(x: Quantized, rows: int) -> Array:
    """A scale for each row, `… seq 1`."""
    return jnp.repeat(x.scales, rows, axis=-1)[..., : x.values.shape[-2], None]
