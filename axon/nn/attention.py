"""Multi-head attention with grouped keys and values."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import ArraySpec, add, einsum
from axon.axes.patterns import parse_names
from axon.axes.specs import entries, num_shards
from axon.kernels.attention import AttentionConfig, AttentionInputs, Mask, attention_and_lse, mean_keys
from axon.nn.flops import matmul_flops
from axon.nn.inputs import Inputs
from axon.nn.kv_cache import QUERIES, KVCache, cached_attention, kv_cache_specs
from axon.nn.norm import RMSNorm
from axon.nn.param import Dims, Param, constant, fan_in
from axon.nn.rope import Rope, rotate
from axon.parallel.context import Route, gathered_attention, ring_attention, route

EXCHANGED = "batch seq.attention heads.attention head_dim"
"""Queries, as they are while attention is computed."""


class Attention(nnx.Module):
    """Attention over the tokens of a sequence, and over those in a cache (Vaswani et al., arXiv:1706.03762).

    Args:
        dims: sizes of embed, heads, kv_heads and head_dim.
        mask: which keys a query sees.
        rope: rotates queries and keys by their positions; None for none.
        scale: of the scores, 1/√head_dim by default. soft_cap: c of c·tanh(score / c) (Gemma 2, arXiv:2408.00118).
        sinks: whether each head has a learned score that takes part in the softmax and has no value (gpt-oss; Xiao et
            al., arXiv:2309.17453).
        bias: of queries, keys and values (Qwen2), out_bias: of the output (GPT-2).
        qk_norm: makes the norm of each head's queries and that of its keys (Qwen3; Henry et al., arXiv:2010.04245).
        out_scale: of the output projection's initial values.
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
        qk_norm: Callable[[], RMSNorm] | None = None,
        out_scale: float = 1.0,
    ):
        self.rope, self.heads, self.kv_heads, self.head_dim = rope, dims["heads"], dims["kv_heads"], dims["head_dim"]
        self.config = AttentionConfig(mask, self.head_dim**-0.5 if scale is None else scale, soft_cap)
        self.query = Param("embed heads head_dim", dims)
        self.key = Param("embed kv_heads head_dim", dims)
        self.value = Param("embed kv_heads head_dim", dims)
        self.out = Param("heads head_dim embed", dims, fan_in("heads head_dim", out_scale))
        if sinks:
            self.sinks = Param("heads", dims, constant(0.0))
        if bias:
            self.query_bias = Param("heads head_dim", dims, constant(0.0), decay=False)
            self.key_bias = Param("kv_heads head_dim", dims, constant(0.0), decay=False)
            self.value_bias = Param("kv_heads head_dim", dims, constant(0.0), decay=False)
        if out_bias:
            self.out_bias = Param("embed", dims, constant(0.0))
        if qk_norm is not None:
            self.query_norm, self.key_norm = qk_norm(), qk_norm()
        self.bias, self.has_out_bias, self.qk_norm, self.has_sinks = bias, out_bias, qk_norm is not None, sinks

    @jax.named_scope("attention")
    def __call__(self, x: Array, inputs: Inputs, cache: KVCache | None = None) -> tuple[Array, KVCache | None]:
        """`x[batch seq embed]` → `batch seq.residual embed`, and the cache with the keys and values of `x` in it."""
        q, k, v = self._project(x)
        if self.rope is not None:
            angles = inputs.angles_of(self.rope, self.head_dim)
            q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (checkpoint_name(a, n) for a, n in ((q, "query"), (k, "key"), (v, "value")))
        sinks = _per_shard(self.sinks) if self.has_sinks else None
        if cache is None:
            out = attend(q, k, v, self.config, inputs, sinks)
        elif inputs.start is None:
            raise ValueError("Attention: a cache of keys and values needs Inputs.start, where to write to it")
        else:
            out, cache = cached_attention(q, k, v, self.config, cache, inputs.start, sinks)
        out = einsum("batch seq heads head_dim, heads head_dim embed -> batch seq.residual embed", out, self.out)
        if self.has_out_bias:
            out = add("batch seq.residual embed, embed -> batch seq.residual embed", out, self.out_bias)
        return out, cache

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The (rope, head_dim) whose angles it uses."""
        return () if self.rope is None else ((self.rope, self.head_dim),)

    def cache_specs(self, batch: int, length: int) -> dict[str, ArraySpec]:
        """A cache of the keys and values of `length` tokens a sequence."""
        return kv_cache_specs(batch, length, self.kv_heads, self.head_dim)

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


def attend(q: Array, k: Array, v: Array, config: AttentionConfig, inputs: Inputs, sinks: Array | None = None) -> Array:
    """The kernel, run by each device on its own sequences, heads and queries.

    `q[batch seq heads head_dim]`, `k, v[batch kv_seq kv_heads head_dim]` → `batch seq heads head_dim`. Queries are
    split as the rows of `seq.attention` and `heads.attention` say; where `seq` is split otherwise, that is an
    all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509). Keys and values of the other positions come by a ring, or all are
    gathered (`Layout.context`), and whole heads are brought to the device first. Where `kv_heads` is split less than
    `heads` is, each device takes those it needs of what it has. `sinks`: as `_per_shard` gives them.
    """
    scope, documents = axes.current(), inputs.documents
    if scope is None:
        pairs, own = None if documents is None else (documents, documents), None if sinks is None else sinks[0, 0]
        return attention_and_lse(q, k, v, config, AttentionInputs(pairs, sinks=own))[0]
    placement, seq = scope.placement, k.shape[1]
    sequences, queries, heads, _ = placement.spec(parse_names(EXCHANGED))
    split, own = placement.mesh_axes("seq.attention"), placement.mesh_axes("heads.attention")
    if set(own) - set(placement.mesh_axes("heads")):
        k, v = (_one_for_each(x, num_shards(own)) for x in (k, v))
        shared = own
    else:
        shared = placement.mesh_axes("kv_heads")
        shared = shared if own[: len(shared)] == shared else ()
    others, group = own[len(shared) :], q.shape[2] // k.shape[2]  # `others`: those among whom keys are shared
    way = _route(placement, config, split, seq)

    def local(q, k, v, documents, of_keys, sinks):
        if others:
            wanted = _kv_heads(lax.axis_index(others) * q.shape[2], q.shape[2], group)
            k, v = jnp.take(k, wanted, axis=2), jnp.take(v, wanted, axis=2)
        sinks = None if sinks is None else sinks[0, 0]
        if way is not None:
            return ring_attention(q, k, v, config, way, documents, sinks)
        pairs = None if documents is None else (documents, of_keys)
        stored = placement.stored_positions(seq) if placement.ring else None
        return gathered_attention(q, k, v, config, AttentionInputs(pairs, sinks=sinks), split, stored)

    of_queries, present = PartitionSpec(sequences, queries, heads, None), None if way is None else queries
    of_keys = PartitionSpec(sequences, present, shared or None, None)
    of_documents = [None if documents is None else PartitionSpec(sequences, axis) for axis in (queries, present)]
    of_sinks = None if sinks is None else PartitionSpec(sequences, queries, heads)
    specs = (of_queries, of_keys, of_keys, *of_documents, of_sinks)
    values = jax.tree.map(axes.reshard, (q, k, v, documents, documents, sinks), specs)
    return axes.reshard(axes.per_device(local, specs, of_queries)(*values), placement.spec(parse_names(QUERIES)))


def _route(placement: axes.Placement, config: AttentionConfig, split: tuple[str, ...], seq: int) -> Route | None:
    """How keys and values travel, in a ring; None where they are gathered. Leaves word of it."""
    if not split:
        return None
    over = " × ".join(f"{axis!r} = {num_shards((axis,))}" for axis in split)
    if not placement.ring:
        axes.log_choice("context", f"keys and values are gathered over {over}: {config}")
        return None
    way = route(split, num_shards(split), config.mask, seq)
    if isinstance(way, str):
        axes.log_choice("context", f"keys and values are gathered over {over}, as {way}")
        return None
    axes.log_choice("context", f"a ring over {over}, {way.steps} steps: {config}")
    return way


def _one_for_each(x: Array, num_shards: int) -> Array:
    """`batch seq kv_heads head_dim` with each head repeated as often as lets `num_shards` divide them."""
    times = num_shards // math.gcd(x.shape[2], num_shards)
    if times == 1:
        return x
    x = jnp.broadcast_to(x[:, :, :, None], (*x.shape[:3], times, x.shape[3]))
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _kv_heads(first: Array, heads: int, group: int) -> Array:
    """Which heads of the keys `heads` query heads from `first` on look at, `group` of the latter to one of the former.

    As few as serve them in equal groups, else one for each.
    """
    if heads % group == 0 or group % heads == 0:
        return first // group + jnp.arange(max(1, heads // group))
    return (first + jnp.arange(heads)) // group
