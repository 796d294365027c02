"""Rounding to 8 bits on TPUs in one pass: a Pallas kernel that finds largest magnitudes and rounds while it has both.

XLA reads an array twice for this, for the largest magnitudes and to round. Here all that share a scale are in VMEM at
once. What XLA can compute of the array number by number (a norm's scale, `dy` times the scales of an operand) it may
compute as the kernel reads it.
"""

import math
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from axon.axes import MAX
from axon.kernels.cost import Cost
from axon.kernels.quantized_matmul.quantize import Quantized
from axon.kernels.quantized_matmul.tiling import LANES, SUBLANES

BLOCK = 2**20
"""Numbers of a block, at most: 1 MB in 8 bits, of which HBM takes longer than a step of the grid costs."""

VMEM = 48 * 2**20
"""Bytes for a block as it comes and as it goes, twice each, and in float32: a v7x has 64 MiB, the others more."""

OPERATIONS = 4
"""The operations of a number: its magnitude, the larger of two, a multiplication, rounding."""


def unfit(shape: tuple[int, ...], shared: tuple[int, ...]) -> str | None:
    """Why the kernel cannot round an array whose scales are shared along the axes `shared`; None if it can."""
    laid_out = tuple(shape[i] for i in _order(len(shape)))
    if len(shape) < 2 or laid_out[-1] % LANES or laid_out[-2] % SUBLANES:
        return f"the last two axes are multiples of {SUBLANES} and {LANES}, not {' × '.join(map(str, laid_out[-2:]))}"
    if not _block(shape, shared):
        return f"{math.prod(shape[i] for i in shared):,} numbers share a scale, too many for VMEM"
    return None


def cost(shape: tuple[int, ...], itemsize: int, num_scales: int) -> Cost:
    """With each number read once, and what is rounded written once."""
    size = math.prod(shape)
    return Cost(OPERATIONS * size, (itemsize + 1) * size + 4 * num_scales)


class Formula(Protocol):
    """How numbers are rounded. Equal ones hash alike, as a program has one kernel for all that round alike."""

    @property
    def dtype(self) -> str:
        """The dtype of what is rounded."""
        ...

    def scales(self, largest: Array) -> Array:
        """The scales for these largest magnitudes, float32."""
        ...

    def values(self, x: Array, scales: Array) -> Array:
        """`x` over its scales, in `dtype`."""
        ...


@partial(jax.jit, static_argnums=(1, 2), static_argnames="interpret")
def quantize_tpu(x: Array, shared: tuple[int, ...], formula: Formula, *, interpret: Any = False) -> Quantized:
    """`x` in 8 bits with a scale for all along the axes `shared`, and for each place along the others.

    It is jitted so that a program's calls for equal operands are one computation to XLA, which then makes it once: a
    kernel that is traced anew for each call differs from the last in what it says of its place in the source.

    Args:
        x: at least two axes, which fit (`unfit`). From four on the second is laid out before the last: of `batch seq
            heads head_dim` the order is that of attention's kernels, and tiles are of `seq` and `head_dim`.
    """
    order = _order(x.ndim)
    laid_out, own = jnp.transpose(x, order), tuple(sorted(order.index(i) for i in shared))
    values, scales = _call(laid_out, own, formula, interpret)
    back = tuple(order.index(i) for i in range(x.ndim))
    whole = values.reshape(x.shape) if _joins(laid_out.ndim, own) else jnp.transpose(values, back)
    return Quantized(whole, jnp.transpose(scales, back))


def _call(x: Array, shared: tuple[int, ...], formula: Formula, interpret: Any) -> Any:
    """The kernel's values and scales, of `x` as it is laid out."""
    block = _laid_out_block(x.shape, shared)
    of_scales = [tuple(1 if i in shared else n for i, n in enumerate(sizes)) for sizes in (block, x.shape)]
    joined, of_values, place = _joins(x.ndim, shared), [block, x.shape], _place
    if joined:
        of_values = [(first, rows, heads * width) for first, heads, rows, width in of_values]
        place = _joined_place
    estimate = cost(x.shape, x.dtype.itemsize, math.prod(of_scales[1]))
    return pl.pallas_call(
        partial(_kernel, shared, formula, joined),
        out_shape=[jax.ShapeDtypeStruct(of_values[1], formula.dtype), jax.ShapeDtypeStruct(of_scales[1], jnp.float32)],
        grid=tuple(size // part for size, part in zip(x.shape, block, strict=True)),
        in_specs=[pl.BlockSpec(block, _place)],
        out_specs=[pl.BlockSpec(of_values[0], place), pl.BlockSpec(of_scales[0], _place)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * x.ndim, vmem_limit_bytes=VMEM, allow_input_fusion=[True]
        ),
        cost_estimate=pl.CostEstimate(flops=estimate.flops, bytes_accessed=estimate.bytes, transcendentals=0),
        interpret=interpret,
        name="quantize",
    )(x)


def _kernel(shared, formula, joined, x, rounded, scales):
    numbers = x[...].astype(jnp.float32)
    own = formula.scales(MAX.over(jnp.abs(numbers), axis=shared, keepdims=True))
    scales[...] = own
    values = formula.values(numbers, own)
    if not joined:
        rounded[...] = values
        return
    width = values.shape[-1]
    for head in range(values.shape[1]):
        rounded[0, :, head * width : (head + 1) * width] = values[0, head]


def _place(*index: Array) -> tuple[Array, ...]:
    return index


def _joined_place(first: Array, _: Array, rows: Array, width: Array) -> tuple[Array, ...]:
    return first, rows, width


def _joins(rank: int, shared: tuple[int, ...]) -> bool:
    """Whether what is laid out as `batch heads seq head_dim` is written as `batch seq (heads head_dim)`: a product that
    sums over both has then one axis to sum over, by which XLA multiplies in 8 bits at 2.5 times the speed."""
    return (rank, shared) == (4, (1, 3))


def _order(rank: int) -> tuple[int, ...]:
    """The axes as they are laid out."""
    return tuple(range(rank)) if rank < 4 else (0, *range(2, rank - 1), 1, rank - 1)


def _block(shape: tuple[int, ...], shared: tuple[int, ...]) -> tuple[int, ...]:
    order = _order(len(shape))
    return _laid_out_block(tuple(shape[i] for i in order), tuple(order.index(i) for i in shared))


def _laid_out_block(shape: tuple[int, ...], shared: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of a block: all along axes that share a scale, and as many along one of the last two as there is room
    for; none if there is no room for a register's."""
    rank = len(shape)
    free = next((i for i in (rank - 2, rank - 1) if i not in shared), None)
    whole = [shape[i] if i in shared or (i >= rank - 2 and i != free) else 1 for i in range(rank)]
    room = BLOCK // math.prod(whole)
    if free is None:
        return tuple(whole) if room else ()
    step = SUBLANES if free == rank - 2 else LANES
    fitting = [size for size in range(step, min(room, shape[free]) + 1, step) if shape[free] % size == 0]
    return tuple(fitting[-1] if i == free else size for i, size in enumerate(whole)) if fitting else ()
