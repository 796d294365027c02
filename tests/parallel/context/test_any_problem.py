"""Attention over context shards against the plain reference, on problems that hypothesis draws; gradients included."""

import math
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import shard
from axon.axes.specs import entries, num_shards
from axon.kernels.attention import AttentionConfig, AttentionInputs, Causal, SameDocument, Window, attention_reference
from axon.layout import Layout, Placement
from axon.nn import Inputs
from axon.nn.attend import attend

BATCH = 2
MESHES = {
    "gather": [{"context": 2}, {"context": 4}, {"context": 2, "tensor": 2}],
    "ring": [{"context": 2}, {"context": 4}, {"context": 2, "tensor": 2}],
    "ulysses": [{"context": 2}, {"context": 4}, {"context": 2, "tensor": 2}],
    "usp": [{"context": 2, "ulysses": 2}, {"context": 2, "ulysses": 2, "tensor": 2}],
}


@dataclass(frozen=True)
class Problem:
    """What a program is compiled for. chunk: positions of a chunk, of which a ring's device has two."""

    method: str = "ring"
    mesh: tuple[tuple[str, int], ...] = (("context", 2),)
    chunk: int = 3
    group: int = 2
    kv_heads: int = 1
    head_dim: int = 4
    window: int | None = 4
    soft_cap: float | None = 2.0
    sinks: bool = True

    @property
    def seq(self):
        return 2 * self.chunk * math.prod(size for axis, size in self.mesh if axis != "tensor")

    @property
    def config(self):
        mask = Causal() & SameDocument()
        return AttentionConfig(mask if self.window is None else mask & Window(self.window), 0.7, self.soft_cap)


@st.composite
def problems(draw):
    method = draw(st.sampled_from(sorted(MESHES)))
    mesh = draw(st.sampled_from(MESHES[method]))
    tensor = mesh.get("tensor", 1)
    shards = math.prod(mesh.values()) if method in ("ulysses", "usp") else tensor  # of heads, at most
    kv_heads = tensor * draw(st.integers(1, 2))
    group = draw(st.sampled_from([g for g in range(1, 9) if g * kv_heads % shards == 0]))
    chunk = draw(st.integers(1, 5))
    seq = 2 * chunk * math.prod(mesh.values()) // tensor
    return Problem(
        method,
        tuple(mesh.items()),
        chunk,
        group,
        kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 8])),
        window=draw(st.none() | st.integers(1, seq + 2)),
        soft_cap=draw(st.none() | st.floats(0.5, 4.0)),
        sinks=draw(st.booleans()),
    )


def starts_of_documents(seq):
    """For each sequence, where documents begin besides its first position."""
    return st.tuples(*[st.sets(st.integers(1, seq - 1), max_size=5)] * BATCH)


@cache
def programs(problem):
    """Output and gradients of a weighted sum of it: by the method, and by the reference over whole sequences."""
    placement = Placement.of(
        Layout(dict(problem.mesh), context=problem.method), jax.devices()[: math.prod(dict(problem.mesh).values())]
    )
    stored = placement.stored_positions(problem.seq)

    def ours(q, k, v, documents, sinks):
        inputs = Inputs(documents, documents, shard(documents[:, stored], "batch seq"))
        q, k, v = (
            shard(x[:, stored], f"batch seq {heads} head_dim")
            for x, heads in ((q, "heads"), (k, "kv_heads"), (v, "kv_heads"))
        )
        if sinks is not None:
            spec = placement.spec(("batch", "seq.attention", "heads.attention"))
            sinks = axes.reshard(sinks * jnp.ones([*(num_shards(entries(part)) for part in spec[:2]), 1]), spec)
        return axes.reshard(attend(q, k, v, problem.config, inputs, sinks), PartitionSpec())[:, np.argsort(stored)]

    def theirs(q, k, v, documents, sinks):
        inputs = AttentionInputs((documents, documents), sinks=sinks)
        return attention_reference(q, k, v, problem.config, inputs)[0]

    def with_gradients(attention):
        def loss(q, k, v, sinks, documents, weight):
            out = attention(q, k, v, documents, sinks)
            return jnp.sum(out * weight), out

        return jax.grad(loss, (0, 1, 2, 3) if problem.sinks else (0, 1, 2), has_aux=True)

    own, plain = jax.jit(with_gradients(ours)), jax.jit(with_gradients(theirs))

    def on_mesh(*given):
        with jax.set_mesh(placement.mesh), axes.activate(axes.Scope(placement)):
            return jax.device_get(own(*given))

    return on_mesh, plain


def check(problem, starts, seed):
    rng, seq, heads = np.random.default_rng(seed), problem.seq, problem.group * problem.kv_heads
    shapes = [(BATCH, seq, n, problem.head_dim) for n in (heads, problem.kv_heads, problem.kv_heads, heads)]
    q, k, v, weight = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    sinks = rng.normal(size=heads).astype(np.float32) if problem.sinks else None
    documents = np.array([[sum(begin <= i for begin in row) for i in range(seq)] for row in starts], np.int32)
    ours, theirs = (run(q, k, v, sinks, documents, weight) for run in programs(problem))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * max(np.linalg.norm(other), 1.0)


@settings(max_examples=8)
@given(starts_of_documents(Problem().seq), st.integers(0, 2**31))
def test_a_ring_is_attention_over_documents_wherever_they_begin(starts, seed):
    check(Problem(), starts, seed)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_attention_over_shards_is_attention_over_whole_sequences(data):
    """Any method, mesh, window, group, head_dim, soft cap, and with sinks or without."""
    problem = data.draw(problems())
    check(problem, data.draw(starts_of_documents(problem.seq)), data.draw(st.integers(0, 2**31)))
