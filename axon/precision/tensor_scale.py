"""Arrays in e4m3 or float16 with a scale of all, as FP8-LM keeps an optimizer's moments (Peng et al., arXiv:2310.18313,
section 2.2)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from axon.axes import Names
from axon.precision.formats import E4M3, largest_magnitudes, spread

SMALLEST = float(jnp.finfo(jnp.float16).smallest_subnormal)


class Scaled(NamedTuple):
    """An array as `values · scales`, and along each axis as many scales as there are tensors: one, or one each."""

    values: Any  # float8_e4m3fn for numbers of either sign, float16 for those of 0 and more
    scales: Any  # float32: by which the largest magnitude is the largest number there is


def scaled(x: Array, counts: tuple[int, ...], over: Names, signed: bool) -> Scaled:
    """`x` as so many tensors along each axis, parts of which devices have along the mesh axes `over`.

    Rounded to nearest even; a tensor that is not finite does not become so. Without `signed`, `x` is 0 or more, and
    only 0 becomes 0: what is divided by its root stays bounded.
    """
    dtype = jnp.dtype(E4M3 if signed else jnp.float16)
    largest = largest_magnitudes(x, counts, over)
    scales = jnp.maximum(largest * (1 / float(jnp.finfo(dtype).max)), jnp.finfo(jnp.float32).tiny)
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    part = x * (1 / spread(scales, x.shape))
    return Scaled((part if signed else jnp.where(part > 0, jnp.maximum(part, SMALLEST), part)).astype(dtype), scales)


def descaled(kept: Scaled) -> Array:
    """The numbers that are kept, float32."""
    return kept.values.astype(jnp.float32) * spread(kept.scales, kept.values.shape)
