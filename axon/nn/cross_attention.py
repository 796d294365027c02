"""Attention of a decoder to what an encoder made of another sequence."""

import jax
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon.axes import einsum
from axon.kernels.attention import AttentionConfig, Everything, SameDocument
from axon.nn.attend import attend_across
from axon.nn.flops import matmul_flops
from axon.nn.inputs import Inputs
from axon.nn.param import Dims, Param, fan_in

QUERY = "batch seq heads head_dim"


class CrossAttention(nnx.Module):
    """Attention over all positions of `Inputs.encoded`, of the query's document (Vaswani et al., arXiv:1706.03762).

    Args:
        dims: sizes of embed, heads and head_dim. scale: of the scores, 1/√head_dim by default.
        query_scale, out_scale: of the initial values of the projections of queries and of the output.
    """

    remat_names = ("query", "key", "value", "attention")
    """The activations that a remat policy can keep by name."""

    def __init__(self, dims: Dims, *, scale: float | None = None, query_scale: float = 1.0, out_scale: float = 1.0):
        default = dims["head_dim"] ** -0.5
        self.config = AttentionConfig(Everything() & SameDocument(), default if scale is None else scale)
        self.heads, self.head_dim = dims["heads"], dims["head_dim"]
        self.query = Param("embed heads head_dim", dims, fan_in("embed", query_scale))
        self.key = Param("embed heads head_dim", dims)
        self.value = Param("embed heads head_dim", dims)
        self.out = Param("heads head_dim embed", dims, fan_in("heads head_dim", out_scale))

    @jax.named_scope("cross_attention")
    def __call__(self, x: Array, inputs: Inputs) -> Array:
        """`x[batch seq embed]` → `batch seq.residual embed`."""
        if inputs.encoded is None:
            raise ValueError("CrossAttention: Inputs.encoded, what it attends to, is missing")
        pattern = f"batch seq embed, embed heads head_dim -> {QUERY}"
        operands = ((x, self.query, "query"), (inputs.encoded, self.key, "key"), (inputs.encoded, self.value, "value"))
        q, k, v = (checkpoint_name(einsum(pattern, one, weight), name) for one, weight, name in operands)
        out = attend_across(q, k, v, self.config, inputs)
        return einsum(f"{QUERY}, heads head_dim embed -> batch seq.residual embed", out, self.out)

    def flops(self, seq: int) -> int:
        """Forward FLOPs of one token: its projections, and two products with as many keys as the encoder has tokens,
        taken as `seq`."""
        return matmul_flops(self) + 4 * self.heads * self.head_dim * seq
