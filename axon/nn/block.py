"""The blocks that families share: attention, then an MLP or experts, each on the normalised residual stream."""

from typing import Any

from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon.nn.auxiliary import Auxiliary
from axon.nn.cache import CacheSpec
from axon.nn.inputs import Inputs

RESIDUAL = "batch seq.residual embed"
"""The stream between blocks."""


class Block(nnx.Module):
    """The base of a block with one `attention`, whose cache is its own."""

    attention_norm: Any
    attention: Any

    remat_names = ("residual",)
    """The activations that can be kept by name for the backward: the stream after attention."""

    def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
        return self.attention.cache_specs(batch, length)


class MLPBlock(Block):
    """Attention and an MLP, each on the normalised residual stream and added to it."""

    mlp_norm: Any
    mlp: Any

    def __call__(self, x: Array, inputs: Inputs, cache: Any = None) -> tuple[Array, Any, Auxiliary]:
        out, cache = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = checkpoint_name(x + out, "residual")
        return x + self.mlp(self.mlp_norm(x, RESIDUAL)), cache, Auxiliary()


class MoEBlock(Block):
    """Attention and a mixture of experts, each on the normalised residual stream and added to it."""

    moe_norm: Any
    moe: Any

    def __call__(self, x: Array, inputs: Inputs, cache: Any = None) -> tuple[Array, Any, Auxiliary]:
        out, cache = self.attention(self.attention_norm(x, RESIDUAL), inputs, cache)
        x = checkpoint_name(x + out, "residual")
        out, auxiliary = self.moe(self.moe_norm(x, RESIDUAL), inputs)
        return x + out, cache, auxiliary.within("moe")
