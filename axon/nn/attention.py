"""Multi-head attention with grouped keys and values."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import add, einsum
from axon.axes.patterns import parse_names
from axon.kernels import attention as kernel
from axon.kernels.attention import Mask
from axon.nn.inputs import Inputs
from axon.nn.memory import QUERIES, recall
from axon.nn.norm import RMSNorm
from axon.nn.param import Dims, Param, constant, fan_in
from axon.nn.rope import rotate


class Attention(nnx.Module):
    """Attention over the tokens of a row, and over those in `memory` (Vaswani et al., arXiv:1706.03762).

    Args:
        dims: sizes of embed, heads, kv_heads and head_dim.
        mask: which keys a query sees.
        bias: of queries, keys and values (Qwen2), out_bias: of the output (GPT-2).
        qk_norm: RMSNorm of each head's queries and keys (Qwen3; Henry et al., arXiv:2010.04245); its eps is norm_eps.
        out_scale: of the output projection's initial values.
    """

    remat_names = ("query", "key", "value", "attention")
    """The activations that `Stack` can keep by name."""

    def __init__(
        self,
        dims: Dims,
        mask: Mask,
        *,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-5,
        out_scale: float = 1.0,
    ):
        self.mask = mask
        self.query = Param("embed heads head_dim", dims)
        self.key = Param("embed kv_heads head_dim", dims)
        self.value = Param("embed kv_heads head_dim", dims)
        self.out = Param("heads head_dim embed", dims, fan_in("heads head_dim", out_scale))
        if bias:
            self.query_bias = Param("heads head_dim", dims, constant(0.0), decay=False)
            self.key_bias = Param("kv_heads head_dim", dims, constant(0.0), decay=False)
            self.value_bias = Param("kv_heads head_dim", dims, constant(0.0), decay=False)
        if out_bias:
            self.out_bias = Param("embed", dims, constant(0.0))
        if qk_norm:
            self.query_norm = RMSNorm("head_dim", dims, norm_eps)
            self.key_norm = RMSNorm("head_dim", dims, norm_eps)
        self.bias, self.has_out_bias, self.qk_norm = bias, out_bias, qk_norm

    @jax.named_scope("attention")
    def __call__(
        self, x: Array, inputs: Inputs, angles: tuple[Array, Array] | None, memory: Any = None
    ) -> tuple[Array, Any]:
        """`x[batch seq embed]` → `batch seq.residual embed`, and the memory with this row's keys and values in it."""
        q, k, v = self._project(x)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (checkpoint_name(a, n) for a, n in ((q, "query"), (k, "key"), (v, "value")))
        if memory is not None:
            if inputs.start is None:
                raise ValueError("Attention: a memory of keys and values needs Inputs.start, where to write to it")
            out, memory = recall(q, k, v, self.mask, memory, inputs.start)
        else:
            out = attend(q, k, v, self.mask, inputs)
        out = einsum("batch seq heads head_dim, heads head_dim embed -> batch seq.residual embed", out, self.out)
        if self.has_out_bias:
            out = add("batch seq.residual embed, embed -> batch seq.residual embed", out, self.out_bias)
        return out, memory

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


def attend(q: Array, k: Array, v: Array, mask: Mask, inputs: Inputs) -> Array:
    """The kernel, run by each device on its own batch rows, heads and queries.

    `q[batch seq heads head_dim]`, `k, v[batch kv_seq kv_heads head_dim]` → `batch seq heads head_dim`. Whatever the
    rows of `kv_seq` and `head_dim` say, the keys and values of a whole row, and whole heads, are brought to the device
    first; and where `kv_heads` is split less than `heads` is, each device takes those it needs of what it has.
    """
    pairs = None if inputs.documents is None else (inputs.documents, inputs.documents)
    scope = axes.current()
    if scope is None:
        return kernel.attention(q, k, v, mask, documents=pairs)
    rows, queries, heads, _ = scope.placement.spec(parse_names(QUERIES))
    split, own = scope.placement.mesh_axes("seq"), scope.placement.mesh_axes("heads")
    shared = scope.placement.mesh_axes("kv_heads")
    shared = shared if own[: len(shared)] == shared else ()
    others, group = own[len(shared) :], q.shape[2] // k.shape[2]  # `others`: those among whom keys are shared

    def local(q, k, v, documents):
        if others:
            wanted = _kv_heads(lax.axis_index(others) * q.shape[2], q.shape[2], group)
            k, v = jnp.take(k, wanted, axis=2), jnp.take(v, wanted, axis=2)
        start = lax.axis_index(split) * q.shape[1] if split else 0
        return kernel.attention(q, k, v, mask, documents=documents, start=start)

    of_queries = PartitionSpec(rows, queries, heads, None)
    of_keys = PartitionSpec(rows, None, shared or None, None)
    of_pairs = pairs and (PartitionSpec(rows, queries), PartitionSpec(rows, None))
    specs = (of_queries, of_keys, of_keys, of_pairs)
    values = jax.tree.map(axes.reshard, (q, k, v, pairs), specs)
    return axes.per_device(local, specs, of_queries)(*values)


def _kv_heads(first: Array, heads: int, group: int) -> Array:
    """Which heads of the keys `heads` query heads from `first` on look at, `group` of the latter to one of the former.

    As few as serve them in equal groups, else one for each.
    """
    if heads % group == 0 or group % heads == 0:
        return first // group + jnp.arange(max(1, heads // group))
    return (first + jnp.arange(heads)) // group
