"""Attention of a decoder to what an encoder made of another sequence."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon import axes
from axon.axes import einsum
from axon.axes.patterns import parse_names
from axon.kernels.attention import AttentionConfig, Everything, SameDocument
from axon.nn.attend import attend_across
from axon.nn.cache import CacheSpec
from axon.nn.flops import matmul_flops
from axon.nn.inputs import Inputs
from axon.nn.param import Dims, Param, fan_in

QUERY = "batch seq heads head_dim"
CACHED = "batch kv_seq heads head_dim.whole"


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
    def __call__(self, x: Array, inputs: Inputs, cache: dict[str, Array] | None = None) -> Array:
        """`x[batch seq embed]` → `batch seq.residual embed`. `cache`: as `encoded_states` made it, which stays as it
        is; None: it attends to `Inputs.encoded`."""
        q = checkpoint_name(self._project(x, self.query), "query")
        if cache is not None:
            out = self._attend_cached(q, inputs, cache)
        elif inputs.encoded is not None:
            k, v = self._keys_and_values(inputs.encoded)
            out = attend_across(q, k, v, self.config, inputs.documents, inputs.encoded_documents)
        else:
            raise ValueError("CrossAttention: Inputs.encoded, what it attends to, is missing, and there is no cache")
        return einsum(f"{QUERY}, heads head_dim embed -> batch seq.residual embed", out, self.out)

    def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
        """Keys and values of a text that an encoder read for each sequence, of `length` tokens at most, and how many
        these are."""
        scope = axes.current()
        dtype, shape = jnp.float32 if scope is None else scope.compute, (batch, length, self.heads, self.head_dim)
        one = CacheSpec(parse_names(CACHED), shape, dtype, cache_kind="state", constant=True)
        lens = CacheSpec(("batch",), (batch,), jnp.int32, cache_kind="state", constant=True)
        return {"cross_key": one, "cross_value": one, "cross_len": lens}

    def encoded_states(self, encoded: Array, lens: Array) -> dict[str, Array]:
        """What `cache_specs` declares, of `encoded[batch seq.residual embed]`, the first `lens[batch]` of each real."""
        k, v = (axes.shard(x, CACHED) for x in self._keys_and_values(encoded))
        return {"cross_key": k, "cross_value": v, "cross_len": lens}

    def flops(self, seq: int) -> int:
        """Forward FLOPs of one token: its projections, and two products with as many keys as the encoder has tokens,
        taken as `seq`."""
        return matmul_flops(self) + 4 * self.heads * self.head_dim * seq

    def _attend_cached(self, q: Array, inputs: Inputs, cache: dict[str, Array]) -> Array:
        """Attention of new tokens to the text of their sequence, a token of every sequence at once."""
        k, v, places = cache["cross_key"], cache["cross_value"], jnp.arange(cache["cross_key"].shape[1])
        of_keys = jnp.where(places < cache["cross_len"][:, None], 0, -1)
        own = jnp.zeros_like(of_keys, shape=(len(of_keys), 1))

        def one(state: tuple[()], q: Array) -> tuple[tuple[()], Array]:
            return state, attend_across(q[:, None], k, v, self.config, own, of_keys)[:, 0]

        return inputs.rows.scan(one, (), q)[1]

    def _keys_and_values(self, encoded: Array) -> tuple[Array, Array]:
        k, v = self._project(encoded, self.key), self._project(encoded, self.value)
        return checkpoint_name(k, "key"), checkpoint_name(v, "value")

    def _project(self, x: Array, weight: Param) -> Array:
        return einsum(f"batch seq embed, embed heads head_dim -> {QUERY}", x, weight)
