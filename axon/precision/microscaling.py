"""MXFP4: e2m1 numbers in blocks whose scale is a power of two (OCP Microscaling Formats 1.0, sections 5.2 and 6.3)."""

import itertools

import jax.numpy as jnp
from jax import Array

from axon.precision.codebook import Codebook, paired, split
from axon.precision.formats import E2M1, E8M0, Format, mx_bytes

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E2M1_CODES = Codebook((*MAGNITUDES, *(-x for x in MAGNITUDES)), most=6.0)
"""The bits of an e2m1 number are its code: a sign, and one of eight magnitudes."""


def mx_packed(x: Array, axis: int, block: int) -> tuple[Array, Array]:
    """Codes, nearest and ties to even, as of `axon.precision.codebook.packed`, and for each block a byte of e8m0.

    Numbers that are MXFP4 already stay what they are, though their scale may become another.
    """
    blocks = split(x.astype(jnp.float32), axis, block)
    largest = jnp.max(jnp.abs(blocks), axis=axis, keepdims=True)
    scales = Format(E2M1, share=block, scale_dtype=E8M0).scales(largest)
    part = (blocks / scales).reshape(x.shape)
    codes = jnp.signbit(part).astype(jnp.uint8) << 3
    for code, (low, high) in enumerate(itertools.pairwise(MAGNITUDES)):
        middle = (low + high) / 2
        codes += (jnp.abs(part) >= middle if code % 2 else jnp.abs(part) > middle).astype(jnp.uint8)
    return paired(codes, axis), mx_bytes(jnp.squeeze(scales, axis))
