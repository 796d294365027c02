"""Formats of few bits: which numbers there are, and how many of an operand share a scale."""

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from axon.axes import MAX, Names
from axon.errors import UserError
from axon.kernels.hadamard import mixed
from axon.kernels.quantized_matmul import Quantized
from axon.kernels.quantized_matmul.quantize import rounded
from axon.precision.stochastic import rounded_to_e2m1

SEQUENCES = "batch"
"""The axis that counts sequences. None share a scale, so that what a scale is does not depend on how many sequences are
worked on at once: not on the layout, and not on microbatches."""

E8M0 = "float8_e8m0fnu"
"""The dtype of scales that are powers of two."""

E4M3 = "float8_e4m3fn"

E2M1 = "float4_e2m1fn"
"""0, ½, 1, 1½, 2, 3, 4, 6 of either sign; kept in e4m3, which has them."""


@dataclass(frozen=True)
class Format:
    """An operand of a product as `values · scales`.

    Args:
        dtype: of the values, rounded to nearest even and limited to what it has.
        share: who shares a scale, of each sequence: all ("tensor"); what is summed up in one place of the result
            ("row"); or so many neighbours along the last of the axes that are summed, all of them if it has fewer.
        tile: with a number for `share`, how many neighbours along the last axis that is not summed share it too.
        scale_dtype: of scales. "float32": the largest magnitude is the largest number of `dtype`. "float8_e8m0fnu":
            2^(⌊log₂ largest magnitude⌋ − ⌊log₂ largest number⌋), as in OCP Microscaling Formats 1.0, section 6.3.
            "float8_e4m3fn": that of float32 as so many of a float32 scale of all, or of all of a sequence, by which the
            largest is 448 (NVIDIA, arXiv:2509.25149, appendix A).
        stochastic: round float4_e2m1fn up or down with the chances that make the mean exact, by bits that follow from
            the number itself: the same on every layout.
        hadamard: multiply each block by a Hadamard matrix with random signs, the same for all, before it is rounded: a
            product of two such operands is that of the plain ones, and an outlier is spread over its block.
    """

    dtype: Literal["int8", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
    share: Literal["tensor", "row"] | int = "tensor"
    tile: int = 1
    scale_dtype: Literal["float32", "float8_e8m0fnu", "float8_e4m3fn"] = "float32"
    stochastic: bool = False
    hadamard: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether scales change along an axis that is summed, so that a product cannot be scaled when it is done."""
        return isinstance(self.share, int)

    @property
    def product(self) -> str:
        """What a chip must have, as `axon.chips.Chip.products` calls it; blocks cannot be scaled when it is done."""
        name = {"int8": "int8", E2M1: "fp4"}.get(self.dtype, "fp8")
        return f"{name} in blocks of {self.share}" if self.in_blocks else name

    @property
    def most(self) -> float:
        """The largest number of `dtype`; of int8 127, so that there is one of either sign."""
        return 127.0 if self.dtype == "int8" else float(jnp.finfo(self.dtype).max)

    def num_scales(self, names: Names, shape: tuple[int, ...], summed: frozenset[str]) -> tuple[int, ...]:
        """How many scales there are along each axis of an operand, whose axes `summed` a product sums over.

        Raises `UserError` where blocks do not divide an axis.
        """
        blocks = self._blocks(names, summed)
        return tuple(self._along(name, size, name in summed, blocks) for name, size in zip(names, shape, strict=True))

    def _blocks(self, names: Names, summed: frozenset[str]) -> dict[str, int]:
        """How many neighbours share a scale along each axis but that of sequences; nothing without blocks."""
        if not isinstance(self.share, int):
            return {}
        own = [name for name in names if name != SEQUENCES]
        along = [name for name in own if name in summed], [name for name in own if name not in summed]
        last = {axes[-1]: size for axes, size in zip(along, (self.share, self.tile), strict=True) if axes}
        return dict.fromkeys(own, 1) | last

    def _along(self, name: str, size: int, summed: bool, blocks: dict[str, int]) -> int:
        if name == SEQUENCES:
            return size
        if not self.in_blocks:
            return size if self.share == "row" and not summed else 1
        block = min(blocks[name], size)
        if size % block:
            raise UserError(
                f"blocks of {block} do not divide the axis {name!r} of {size}: leave what has it out of the "
                "recipe's paths"
            )
        return size // block

    @property
    def has_second(self) -> bool:
        """Whether scales share one of their own."""
        return self.scale_dtype == E4M3

    def rotated(self, x: Array, names: Names, summed: frozenset[str], counts: tuple[int, ...]) -> Array:
        """`x`, or with `hadamard` each of its blocks, as `counts` has them, mixed; float32."""
        if not self.hadamard:
            return x
        axis = names.index([name for name in names if name in summed and name != SEQUENCES][-1])
        block = x.shape[axis] // counts[axis]
        if block & (block - 1):
            raise UserError(
                f"blocks of {block} of the axis {names[axis]!r} are mixed by no Hadamard matrix: make the axis a "
                f"multiple of {self.share}, or leave what has it out of the recipe's paths"
            )
        return jnp.moveaxis(mixed(jnp.moveaxis(x.astype(jnp.float32), axis, -1), block), -1, axis)

    def scales(self, largest: Array, of_all: Array | None = None) -> Array:
        """The scales for these largest magnitudes, in float32; not a number where they are not finite.

        `of_all`: the largest of those that share a second scale.
        """
        if self.scale_dtype == E8M0:
            return _powers_of_two(largest, self.most)
        scales = jnp.maximum(largest * (1 / self.most), jnp.finfo(jnp.float32).tiny)
        if of_all is not None:
            most = float(jnp.finfo(E4M3).max)
            second = jnp.maximum(of_all * (1 / (self.most * most)), jnp.finfo(jnp.float32).tiny)
            scales = rounded(scales / second, jnp.dtype(E4M3)).astype(jnp.float32) * second
        return jnp.where(jnp.isfinite(largest), scales, jnp.nan)

    def values(self, x: Array, scales: Array) -> Array:
        """`x` over its scales, of which there is one for each number or one for all along an axis; 0 where they are."""
        scaled = x.astype(jnp.float32) * jnp.where(scales == 0, 0, 1 / scales)
        if self.dtype != E2M1:
            return rounded(scaled, jnp.dtype(self.dtype))
        scaled = rounded_to_e2m1(scaled) if self.stochastic else scaled
        return rounded(scaled, jnp.dtype(E2M1)).astype(E4M3)


def quantized(x: Array, form: Format, largest: Array, of_all: Array | None = None) -> Quantized:
    """`x` with scales that follow from these magnitudes, of which there are as many."""
    scales = form.scales(largest, of_all)
    return Quantized(form.values(x, spread(scales, x.shape)), scales)


def largest_magnitudes(x: Array, counts: tuple[int, ...], over: Names = ()) -> Array:
    """The largest magnitudes of even blocks, so many along each axis, and of devices along the mesh axes `over`,
    float32; not a number where a block has one that is not.
    """
    whole = tuple(i for i, count in enumerate(counts) if count == 1)
    partial = [i for i, (size, count) in enumerate(zip(x.shape, counts, strict=True)) if 1 < count < size]
    found = MAX.over(jnp.abs(x), axis=whole, keepdims=True)
    for i in partial:
        found = MAX.over(found.reshape(*found.shape[:i], counts[i], -1, *found.shape[i + 1 :]), axis=i + 1)
    return (MAX.over_mesh_axis(found, over) if over else found).astype(jnp.float32)


def spread(scales: Array, shape: tuple[int, ...]) -> Array:
    """The scales once for each number that has them; along an axis of which all share one, it stays one."""
    for i, (size, count) in enumerate(zip(shape, scales.shape, strict=True)):
        if 1 < count < size:
            scales = jnp.repeat(scales, size // count, axis=i)
    return scales


def mx_bytes(scales: Array) -> Array:
    """Powers of two as bytes of e8m0: the exponent and 127; 255 for what is not a number."""
    return (lax.bitcast_convert_type(scales, jnp.int32) >> 23).astype(jnp.uint8)


def mx_scales(stored: Array) -> Array:
    """The scales of these bytes, float32. 2⁻¹²⁷, which is less than float32's normal numbers, is 0."""
    powers = lax.bitcast_convert_type(stored.astype(jnp.int32) << 23, jnp.float32)
    return jnp.where(stored == 255, jnp.nan, powers)


def _powers_of_two(largest: Array, most: float) -> Array:
    """Exponents are limited to those that float32 has without subnormal numbers, −126 … 127."""
    _, exponent = jnp.frexp(largest)
    power = jnp.clip(jnp.where(largest == 0, -126, exponent - math.frexp(most)[1]), -126, 127)
    return jnp.where(jnp.isfinite(largest), jnp.ldexp(jnp.float32(1), power), jnp.nan)
