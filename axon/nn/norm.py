"""Normalisation over one axis, in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from axon.axes import add, einsum
from axon.nn.mean_square import mean_square
from axon.nn.param import Dims, Param, constant


class RMSNorm(nnx.Module):
    """x / √(mean(x²) + eps) · scale over `axis`, or several (Zhang & Sennrich, arXiv:1910.07467).

    `zero_centered`: the factor is 1 + scale, and scale is 0 at first (Gemma).
    """

    remat_names = ("inverse_rms",)
    """The activations that a remat policy can keep by name: one number a token, else summed again in the backward."""

    def __init__(self, axis: str, dims: Dims, eps: float = 1e-5, zero_centered: bool = False):
        self.scale = Param(axis, dims, constant(0.0 if zero_centered else 1.0), decay=False)
        self.over = tuple(range(-len(self.scale.axes), 0))
        self.axis, self.eps, self.zero_centered = axis, eps, zero_centered

    @jax.named_scope("norm")
    def __call__(self, x: Array, pattern: str) -> Array:
        """`pattern` names the axes of `x`, this norm's last: `"batch seq embed"`."""
        wide = x.astype(jnp.float32)
        inverse_rms = checkpoint_name(lax.rsqrt(mean_square(x, self.over) + self.eps), "inverse_rms")
        normed = (wide * inverse_rms).astype(x.dtype)
        product = einsum(f"{pattern}, {self.axis} -> {pattern}", normed, self.scale)
        return normed + product if self.zero_centered else product


class LayerNorm(nnx.Module):
    """(x − mean) / √(variance + eps) · scale + bias over the last axis (Ba et al., arXiv:1607.06450)."""

    def __init__(self, axis: str, dims: Dims, eps: float = 1e-5):
        self.scale = Param(axis, dims, constant(1.0))
        self.bias = Param(axis, dims, constant(0.0))
        self.axis, self.eps = axis, eps

    @jax.named_scope("norm")
    def __call__(self, x: Array, pattern: str) -> Array:
        """`pattern` names the axes of `x`, this norm's last: `"batch seq embed"`."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        pattern = f"{pattern}, {self.axis} -> {pattern}"
        return add(pattern, einsum(pattern, normed.astype(x.dtype), self.scale), self.bias)
