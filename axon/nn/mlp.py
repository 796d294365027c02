"""Feed-forward networks."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from axon.axes import add, einsum, platform
from axon.checks import check_range
from axon.nn.param import Dims, Param, constant, fan_in
from axon.nn.remat import recomputed

UP = "batch seq embed, embed mlp -> batch seq mlp"
DOWN = "batch seq mlp, mlp embed -> batch seq.residual embed"


def gelu(x: Array) -> Array:
    """By its tanh form (Hendrycks & Gimpel, arXiv:1606.08415)."""
    return jax.nn.gelu(x, approximate=True)


def exact_gelu(x: Array) -> Array:
    """x·Φ(x), Φ the normal distribution function (the same)."""
    return jax.nn.gelu(x, approximate=False)


Activation = Callable[[Array, Array], Array]
"""Of a gated MLP's gate and up, each `… mlp`, what goes into its last product."""


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) · up (Shazeer, arXiv:2002.05202)."""
    return jax.nn.silu(gate) * up


def geglu(gate: Array, up: Array) -> Array:
    """gelu(gate) · up (the same)."""
    return gelu(gate) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate · σ(alpha · gate) · (up + 1), of a gate of at most `limit` and an up within ±`limit`: gpt-oss's
    (OpenAI, arXiv:2508.10925)."""

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self):
        check_range(self, "(0, inf)", "alpha", "limit")

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (jnp.clip(up, -self.limit, self.limit) + 1)


class GatedMLP(nnx.Module):
    """down(activation(gate(x), up(x)))."""

    remat_names = ("gate", "up")
    """The activations that a remat policy can keep by name."""

    def __init__(self, dims: Dims, *, activation: Activation = swiglu, out_scale: float = 1.0):
        self.activation = activation
        self.gate = Param("embed mlp", dims)
        self.up = Param("embed mlp", dims)
        self.down = Param("mlp embed", dims, fan_in("mlp", out_scale))

    @jax.named_scope("mlp")
    def __call__(self, x: Array) -> Array:  # batch seq embed
        gate = _named(einsum(UP, x, self.gate), "gate")
        up = _named(einsum(UP, x, self.up), "up")
        return einsum(DOWN, self.activation(gate, up), self.down)


def _named(x: Array, name: str) -> Array:
    """`x` under a name for remat policies; what the backward makes again is then no product to XLA for TPUs.

    The gate's gradient costs nothing in the epilogue of the product that makes the gradient of silu(gate)·up. It also
    needs gate and up: where one of them is a product too, XLA has two epilogues to choose from, chooses neither, and
    reads all three arrays once more.
    """
    x = checkpoint_name(x, name)
    return lax.optimization_barrier(x) if platform() == "tpu" and recomputed(name) else x


class MLP(nnx.Module):
    """down(activation(up(x))): GPT-2's, with biases; without them T5's."""

    remat_names = ("up",)
    """The activations that a remat policy can keep by name."""

    def __init__(
        self,
        dims: Dims,
        out_scale: float = 1.0,
        *,
        activation: Callable[[Array], Array] = gelu,
        bias: bool = True,
    ):
        self.activation, self.bias = activation, bias
        self.up = Param("embed mlp", dims)
        self.down = Param("mlp embed", dims, fan_in("mlp", out_scale))
        if bias:
            self.up_bias = Param("mlp", dims, constant(0.0))
            self.down_bias = Param("embed", dims, constant(0.0))

    @jax.named_scope("mlp")
    def __call__(self, x: Array) -> Array:  # batch seq embed
        up = checkpoint_name(einsum(UP, x, self.up), "up")
        if self.bias:
            up = add("batch seq mlp, mlp -> batch seq mlp", up, self.up_bias)
        down = einsum(DOWN, self.activation(up), self.down)
        if not self.bias:
            return down
        return add("batch seq.residual embed, embed -> batch seq.residual embed", down, self.down_bias)
