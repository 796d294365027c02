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
from axon.nn.kv_cache import KVCache
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
    def __call__(self, x: Array, inputs: Inputs, cache: KVCache | None = None) -> tuple[Array, KVCache]:
        """`x[batch seq embed]` → `batch seq.residual embed`, and what a cache is to keep of `Inputs.encoded`: its
        `cross_key` and `cross_value`, each `batch seq heads head_dim`. Without `encoded` they are those of `cache`, and
        there is nothing more to keep."""
        new = self._keys_and_values(inputs.encoded)
        found = new or cache or {}
        if "cross_key" not in found:
            raise ValueError(
                "CrossAttention: Inputs.encoded, what it attends to, is missing, and no cache has its keys"
            )
        q = checkpoint_name(self._project(x, self.query), "query")
        out = attend_across(q, found["cross_key"], found["cross_value"], self.config, inputs)
        return einsum(f"{QUERY}, heads head_dim embed -> batch seq.residual embed", out, self.out), new

    def flops(self, seq: int) -> int:
        """Forward FLOPs of one token: its projections, and two products with as many keys as the encoder has tokens,
        taken as `seq`."""
        return matmul_flops(self) + 4 * self.heads * self.head_dim * seq

    def _keys_and_values(self, encoded: Array | None) -> KVCache:
        if encoded is None:
            return {}
        k, v = self._project(encoded, self.key), self._project(encoded, self.value)
        return {"cross_key": checkpoint_name(k, "key"), "cross_value": checkpoint_name(v, "value")}

    def _project(self, x: Array, weight: Param) -> Array:
        return einsum(f"batch seq embed, embed heads head_dim -> {QUERY}", x, weight)
