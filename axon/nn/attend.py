"""Attention whose heads and positions a layout splits, in any of the ways of `Layout.context`."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Names
from axon.axes.specs import num_shards
from axon.errors import UserError
from axon.kernels.attention import AttentionConfig, AttentionInputs, attention_and_lse
from axon.kernels.attention.fp8 import KEYS
from axon.nn.inputs import Inputs
from axon.parallel.context import Positions, Route, gathered_attention, permuted, ring_attention, route

RINGS = ("ring", "usp")
"""The methods of `Layout.context` by which keys and values travel in a ring."""

QUERIES = ("batch", "seq", "heads")
EXCHANGED = ("batch", "seq.attention", "heads.attention")
"""Queries while attention is computed, heads whole."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    config: AttentionConfig,
    inputs: Inputs,
    sinks: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """The kernel, run by each device on its own sequences, heads and queries.

    `q[batch seq heads head_dim]`, `k, v[batch kv_seq kv_heads head_dim]` → `batch seq heads head_dim`. Queries are
    split as the rows of `seq.attention` and `heads.attention` have it: where they differ from those of `seq` and
    `heads`, positions are exchanged for heads by an all-to-all (DeepSpeed-Ulysses, arXiv:2309.14509). Keys and values
    of other positions come by a ring, or all are gathered (`Layout.context`). Whatever the layout's row of `head_dim`
    says, whole heads are brought to the device first. `sinks[batch seq.attention heads.attention]` and a `bias` by
    distance, the same with a last axis `_distances`: once for each part that `batch` and `seq.attention` are cut into.
    """
    scope, documents = axes.current(), inputs.documents
    if scope is None:
        pairs, own = None if documents is None else (documents, documents), None if sinks is None else sinks[0, 0]
        own_bias = None if bias is None else bias[0, 0]
        return attention_and_lse(q, k, v, config, AttentionInputs(pairs, sinks=own, distance_bias=own_bias))[0]
    config = replace(config, products=scope.attention)
    work = _Attention(scope.placement, config, k.shape[1], q.shape[2] // k.shape[2])
    return work(q, k, v, documents, sinks, bias)


def attend_across(
    q: Array, k: Array, v: Array, config: AttentionConfig, documents: Array | None, of_keys: Array | None
) -> Array:
    """Attention to the tokens of another sequence, which all are on each device, by a mask without positions.

    `q[batch seq heads head_dim]`, `k, v[batch kv_seq heads head_dim]` → `batch seq heads head_dim`; `documents[batch
    seq]` of the queries and `of_keys[batch kv_seq]`.
    """

    def local(q, k, v, documents, of_keys):
        pairs = None if documents is None or of_keys is None else (documents, of_keys)
        return attention_and_lse(q, k, v, config, AttentionInputs(pairs))[0]

    scope = axes.current()
    if scope is None:
        return local(q, k, v, documents, of_keys)
    config = replace(config, products=scope.attention)
    sequences, queries, heads = scope.placement.spec(QUERIES)
    of_queries, all_keys = PartitionSpec(sequences, queries, heads, None), PartitionSpec(sequences, None, heads, None)
    of_documents = None if documents is None else PartitionSpec(sequences, queries)
    specs = (of_queries, all_keys, all_keys, of_documents, None if of_keys is None else PartitionSpec(sequences, None))
    values = jax.tree.map(axes.reshard, (q, k, v, documents, of_keys), specs)
    return axes.per_device(local, specs, of_queries)(*values)


@dataclass(frozen=True)
class _Attention:
    """Attention over sequences of `seq` positions, `group` query heads to one of the keys, on a mesh."""

    placement: axes.Placement
    config: AttentionConfig
    seq: int
    group: int

    def __call__(
        self, q: Array, k: Array, v: Array, documents: Array | None, sinks: Array | None, bias: Array | None
    ) -> Array:
        sequences, queries, heads = self.placement.spec(EXCHANGED)
        of_queries = PartitionSpec(sequences, queries, heads, None)
        way, shared = self._route(bias is not None), self._shared
        if self._moved:
            shared = self._heads
            # Where each head has keys of its own they may be where they are looked at already, as in LatentAttention.
            if self.group > 1 or self.placement.mesh_axes("kv_heads") != self.placement.mesh_axes("heads"):
                k, v = self._one_for_each(k), self._one_for_each(v)
            axes.log_choice(
                "context", f"positions are exchanged for heads over {_described(self._moved)}: {self.config}"
            )
        present = None if way is None else queries
        of_keys = PartitionSpec(sequences, present, shared or None, None)
        of_documents = [None if documents is None else PartitionSpec(sequences, axis) for axis in (queries, present)]
        of_sinks = None if sinks is None else PartitionSpec(sequences, queries, heads)
        of_bias = None if bias is None else PartitionSpec(sequences, queries, heads, None)
        specs = (of_queries, of_keys, of_keys, *of_documents, of_sinks, of_bias)
        values = jax.tree.map(axes.reshard, (q, k, v, documents, documents, sinks, bias), specs)
        local = self._local(way, self._heads[len(shared) :])
        out = axes.per_device(local, specs, of_queries)(*values)
        return axes.reshard(out, PartitionSpec(*self.placement.spec(QUERIES), None))

    def _local(self, way: Route | None, others: Names):
        """What a device does; `others`: the mesh axes among whose devices keys are shared."""
        # Asked here: in the region where all mesh axes are manual, a placement knows of none.
        split, stored = self._split, self.placement.stored_positions(self.seq)
        positions = Positions.of(stored, num_shards(split))
        order = positions.order
        if split and self.config.products is not None and positions.length % KEYS:
            raise UserError(
                f"FP8 in attention: {num_shards(split)} devices split a sequence of {self.seq} into runs of "
                f"{positions.length} positions, which blocks of {KEYS} that share a scale do not divide. Split it over "
                "fewer devices, make it longer, or set FP8Current.attention to False"
            )

        def local(q, k, v, documents, of_keys, sinks, bias):
            if others:
                wanted = _kv_heads(lax.axis_index(others) * q.shape[2], q.shape[2], self.group)
                k, v = jnp.take(k, wanted, axis=2), jnp.take(v, wanted, axis=2)
            sinks, bias = (None if x is None else x[0, 0] for x in (sinks, bias))
            if way is not None:
                q, k, v, documents = (permuted(x, order) for x in (q, k, v, documents))
                return permuted(ring_attention(q, k, v, self.config, way, documents, sinks), np.argsort(order))
            pairs = None if documents is None else (documents, of_keys)
            inputs = AttentionInputs(pairs, sinks=sinks, distance_bias=bias)
            return gathered_attention(q, k, v, self.config, inputs, split, stored)

        return local

    @property
    def _split(self) -> Names:
        """The mesh axes that split a sequence while attention is computed."""
        return self.placement.mesh_axes("seq.attention")

    @property
    def _heads(self) -> Names:
        return self.placement.mesh_axes("heads.attention")

    @property
    def _moved(self) -> Names:
        """The mesh axes over which positions are exchanged for heads."""
        return tuple(a for a in self._heads if a not in self.placement.mesh_axes("heads"))

    @property
    def _shared(self) -> Names:
        """The mesh axes that split both heads and those of the keys."""
        shared = self.placement.mesh_axes("kv_heads")
        return shared if self._heads[: len(shared)] == shared else ()

    def _one_for_each(self, x: Array) -> Array:
        """`batch seq kv_heads head_dim`, each head as often as lets all devices of an exchange have as many.

        Split over the devices that split `heads` already: so what follows is one all-to-all.
        """
        times = num_shards(self._heads) // math.gcd(x.shape[2], num_shards(self._heads))
        sequences, positions, heads = self.placement.spec(QUERIES)
        (kv_heads,) = self.placement.spec(("kv_heads",))
        x = axes.reshard(x, PartitionSpec(sequences, positions, kv_heads, None))
        if times > 1:
            x = jnp.broadcast_to(x[:, :, :, None], (*x.shape[:3], times, x.shape[3]))
            x = x.reshape(*x.shape[:2], -1, x.shape[4])
        return axes.reshard(x, PartitionSpec(sequences, positions, heads, None))

    def _route(self, biased: bool) -> Route | None:
        """How keys and values travel, in a ring; None where they are gathered, if there are others. It is logged."""
        split = self._split
        if not split:
            return None
        way: Route | str = ""
        if self.placement.context in RINGS:
            no_ring = "a ring's backward has no bias by distance"
            way = no_ring if biased else route(split, num_shards(split), self.config.mask, self.seq)
        if isinstance(way, str):
            why = f", as {way}" if way else ""
            axes.log_choice("context", f"keys and values are gathered over {_described(split)}: {self.config}{why}")
            return None
        axes.log_choice("context", f"a ring over {_described(split)}, steps: {way.steps}: {self.config}")
        return way


def _described(mesh_axes: Names) -> str:
    return " × ".join(f"{axis!r} = {num_shards((axis,))}" for axis in mesh_axes)


def _kv_heads(first: Array, heads: int, group: int) -> Array:
    """Which heads of the keys `heads` query heads from `first` on look at, `group` of the latter to one of the former.

    As few as serve them in equal groups, else one for each.
    """
    if heads % group == 0 or group % heads == 0:
        return first // group + jnp.arange(max(1, heads // group))
    return (first + jnp.arange(heads)) // group
