"""Feed-forward networks."""

from collections.abc import Callable

import jax
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from axon.axes import add, einsum, platform
from axon.nn.activations import Activation, gelu, swiglu
from axon.nn.param import Dims, Param, constant, fan_in
from axon.nn.remat import recomputed

UP = "batch seq embed, embed mlp -> batch seq mlp"
DOWN = "batch seq mlp, mlp embed -> batch seq.residual embed"
UP_BIAS = "batch seq mlp, mlp -> batch seq mlp"
DOWN_BIAS = "batch seq.residual embed, embed -> batch seq.residual embed"


class GatedMLP(nnx.Module):
    """down(activation(gate(x), up(x))), each with a bias or without."""

    remat_names = ("gate", "up")
    """The activations that a remat policy can keep by name."""

    def __init__(self, dims: Dims, *, activation: Activation = swiglu, out_scale: float = 1.0, bias: bool = False):
        self.activation, self.bias = activation, bias
        self.gate = Param("embed mlp", dims)
        self.up = Param("embed mlp", dims)
        self.down = Param("mlp embed", dims, fan_in("mlp", out_scale))
        if bias:
            self.gate_bias, self.up_bias = Param("mlp", dims, constant(0.0)), Param("mlp", dims, constant(0.0))
            self.down_bias = Param("embed", dims, constant(0.0))

    @jax.named_scope("mlp")
    def __call__(self, x: Array) -> Array:  # batch seq embed
        gate = _named(einsum(UP, x, self.gate), "gate")
        up = _named(einsum(UP, x, self.up), "up")
        if not self.bias:
            return einsum(DOWN, self.activation(gate, up), self.down)
        gate, up = add(UP_BIAS, gate, self.gate_bias), add(UP_BIAS, up, self.up_bias)
        return add(DOWN_BIAS, einsum(DOWN, self.activation(gate, up), self.down), self.down_bias)


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
            up = add(UP_BIAS, up, self.up_bias)
        down = einsum(DOWN, self.activation(up), self.down)
        return add(DOWN_BIAS, down, self.down_bias) if self.bias else down
