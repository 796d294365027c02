"""Multi-head attention with grouped keys and values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from axon import axes
from axon.axes import add, einsum
from axon.axes.specs import entries, num_shards
from axon.kernels.attention import AttentionConfig, Mask, mean_keys
from axon.nn.attend import attend
from axon.nn.cache import CacheSpec
from axon.nn.flops import matmul_flops
from axon.nn.inputs import Inputs
from axon.nn.kv_cache import KVCache, PagedSizes, cached_attention, kv_cache_specs, paged_sizes
from axon.nn.norm import RMSNorm
from axon.nn.param import Dims, Param, constant, fan_in
from axon.nn.rope import Rope, rotate


class Attention(nnx.Module):
    """Attention over the tokens of a sequence, and over those in a cache (Vaswani et al., arXiv:1706.03762).

    Args:
        dims: sizes of embed, heads, kv_heads and head_dim.
        mask: which keys a query sees.
        rope: rotates queries and keys by their positions; None for none.
        scale: of the scores, 1/√head_dim by default.
        soft_cap: c of c·tanh(score / c) (Gemma 2, arXiv:2408.00118).
        sinks: whether each head has a learned score that takes part in the softmax and has no value (gpt-oss; Xiao et
            al., arXiv:2309.17453).
        bias: of queries, keys and values (Qwen2), out_bias: of the output (GPT-2).
        biased: whether `Inputs.score_bias` is added to the scores (T5).
        gated: whether each head's output is multiplied by the sigmoid of a projection of its own (Qwen3-Next).
        qk_norm: makes, of "heads" and of "kv_heads", the norm of queries and that of keys (Henry et al.,
            arXiv:2010.04245): over the "head_dim" of each head (Qwen3), or over all "heads head_dim" (OLMo-2).
        query_scale, out_scale: of the initial values of the projections of queries and of the output.
    """

    remat_names = ("query", "key", "value", "attention")
    """The activations that a remat policy can keep by name."""

    def __init__(
        self,
        dims: Dims,
        mask: Mask,
        *,
        rope: Rope | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        bias: bool = False,
        out_bias: bool = False,
        biased: bool = False,
        gated: bool = False,
        qk_norm: Callable[[str], RMSNorm] | None = None,
        query_scale: float = 1.0,
        out_scale: float = 1.0,
    ):
        self.rope, self.heads, self.kv_heads, self.head_dim = rope, dims["heads"], dims["kv_heads"], dims["head_dim"]
        self.config = AttentionConfig(mask, self.head_dim**-0.5 if scale is None else scale, soft_cap)
        self.query = Param("embed heads head_dim", dims, fan_in("embed", query_scale))
        self.key = Param("embed kv_heads head_dim", dims)
        self.value = Param("embed kv_heads head_dim", dims)
        self.out = Param("heads head_dim embed", dims, fan_in("heads head_dim", out_scale))
        if gated:
            self.gate = Param("embed heads head_dim", dims)
        if sinks:
            self.sinks = Param("heads", dims, constant(0.0))
        if bias:
            self.query_bias = Param("heads head_dim", dims, constant(0.0), decay=False)
            self.key_bias = Param("kv_heads head_dim", dims, constant(0.0), decay=False)
            self.value_bias = Param("kv_heads head_dim", dims, constant(0.0), decay=False)
        if out_bias:
            self.out_bias = Param("embed", dims, constant(0.0))
        if qk_norm is not None:
            self.query_norm, self.key_norm = qk_norm("heads"), qk_norm("kv_heads")
        self.bias, self.has_out_bias, self.qk_norm, self.has_sinks = bias, out_bias, qk_norm is not None, sinks
        self.biased, self.gated = biased, gated

    @jax.named_scope("attention")
    def __call__(self, x: Array, inputs: Inputs, cache: KVCache | None = None) -> tuple[Array, KVCache | None]:
        """`x[batch seq embed]` → `batch seq.residual embed`, and the cache with the keys and values of `x` in it."""
        q, k, v = self._project(x)
        if self.rope is not None:
            angles = inputs.angles_of(self.rope, self.head_dim)
            q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (checkpoint_name(a, n) for a, n in ((q, "query"), (k, "key"), (v, "value")))
        sinks = _per_shard(self.sinks) if self.has_sinks else None
        bias = inputs.score_bias if self.biased else None
        if cache is None:
            out = attend(q, k, v, self.config, inputs, sinks, bias)
        else:
            step = inputs.step_of(self.paged_sizes(inputs, cache))
            out, cache = cached_attention(q, k, v, self.config, cache, step, sinks, bias)
        if self.gated:
            gate = einsum("batch seq embed, embed heads head_dim -> batch seq heads head_dim", x, self.gate)
            out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
        out = einsum("batch seq heads head_dim, heads head_dim embed -> batch seq.residual embed", out, self.out)
        if self.has_out_bias:
            out = add("batch seq.residual embed, embed -> batch seq.residual embed", out, self.out_bias)
        return out, cache

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The (rope, head_dim) whose angles it uses."""
        return () if self.rope is None else ((self.rope, self.head_dim),)

    def cache_specs(self, batch: int, length: int) -> dict[str, CacheSpec]:
        """A cache of the keys and values of `length` tokens a sequence."""
        return kv_cache_specs(batch, length, self.kv_heads, self.head_dim)

    def paged_sizes(self, inputs: Inputs, cache: KVCache) -> PagedSizes:
        """The sizes that a step over such a cache depends on."""
        return paged_sizes(cache, inputs.tokens.shape, self.heads, self.config, self.biased)

    def flops(self, seq: int) -> int:
        """Forward FLOPs of one token: its projections, and two products with the keys that it sees on average."""
        products = 4 * self.heads * self.head_dim * mean_keys(self.config.mask, seq)
        return matmul_flops(self) + round(products)

    def _project(self, x: Array) -> tuple[Array, Array, Array]:
        query = "batch seq heads head_dim"
        key = "batch seq kv_heads head_dim"
        q = einsum(f"batch seq embed, embed heads head_dim -> {query}", x, self.query)
        k = einsum(f"batch seq embed, embed kv_heads head_dim -> {key}", x, self.key)
        v = einsum(f"batch seq embed, embed kv_heads head_dim -> {key}", x, self.value)
        if self.bias:
            q = add(f"{query}, heads head_dim -> {query}", q, self.query_bias)
            k = add(f"{key}, kv_heads head_dim -> {key}", k, self.key_bias)
            v = add(f"{key}, kv_heads head_dim -> {key}", v, self.value_bias)
        if self.qk_norm:
            q, k = self.query_norm(q, query), self.key_norm(k, key)
        return q, k, v


def _per_shard(sinks: Param) -> Array:
    """`batch seq heads`: the sinks once for each part that the layout cuts `batch` and `seq` into, each on its device.

    So a device's gradient is of its own part, and `einsum` sums it over devices as it does any weight's: with one copy
    for all the kernel's own transpose would, in each layer and each microbatch.
    """
    scope = axes.current()
    parts = (None, None) if scope is None else scope.placement.spec(("batch", "seq.attention"))
    ones = jnp.ones([num_shards(entries(p)) for p in parts])
    return einsum("batch seq.attention, heads -> batch seq.attention heads.attention", ones, sinks)
