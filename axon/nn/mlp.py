"""Feed-forward networks."""

from collections.abc import Callable

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon.axes import add, einsum
from axon.nn.param import Dims, Param, constant, fan_in

UP = "batch seq embed, embed mlp -> batch seq mlp"
DOWN = "batch seq mlp, mlp embed -> batch seq.residual embed"


def gelu(x: Array) -> Array:
    """By its tanh form (Hendrycks & Gimpel, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=True)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) · up(x)): SwiGLU, or GeGLU with `gelu` (Shazeer, arXiv:2002.05202)."""

    remat_names = ("gate", "up")
    """The activations that a remat policy can keep by name."""

    def __init__(self, dims: Dims, *, activation: Callable[[Array], Array] = jax.nn.silu, out_scale: float = 1.0):
        self.activation = activation
        self.gate = Param("embed mlp", dims)
        self.up = Param("embed mlp", dims)
        self.down = Param("mlp embed", dims, fan_in("mlp", out_scale))

    @jax.named_scope("mlp")
    def __call__(self, x: Array) -> Array:  # batch seq embed
        gate = checkpoint_name(einsum(UP, x, self.gate), "gate")
        up = checkpoint_name(einsum(UP, x, self.up), "up")
        return einsum(DOWN, self.activation(gate) * up, self.down)


class MLP(nnx.Module):
    """down(gelu(up(x))) with biases: GPT-2's."""

    remat_names = ("up",)
    """The activations that a remat policy can keep by name."""

    def __init__(self, dims: Dims, out_scale: float = 1.0):
        self.up = Param("embed mlp", dims)
        self.up_bias = Param("mlp", dims, constant(0.0))
        self.down = Param("mlp embed", dims, fan_in("mlp", out_scale))
        self.down_bias = Param("embed", dims, constant(0.0))

    @jax.named_scope("mlp")
    def __call__(self, x: Array) -> Array:  # batch seq embed
        up = checkpoint_name(einsum(UP, x, self.up), "up")
        up = add("batch seq mlp, mlp -> batch seq mlp", up, self.up_bias)
        down = einsum(DOWN, gelu(up), self.down)
        return add("batch seq.residual embed, embed -> batch seq.residual embed", down, self.down_bias)
