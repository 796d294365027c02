"""Ring attention, values and gradients, against the plain reference over the whole sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon import axes
from axon.kernels import attention
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    FP8Products,
    SameDocument,
    Window,
    attention_and_lse,
    attention_reference,
)
from axon.kernels.attention.reference import attention_gradients_reference
from axon.layout import zigzag
from axon.parallel.context import ring_attention, route

FULL = [Causal(), Everything(), SameDocument(), Causal() & SameDocument()]


def operands(rng, seq, batch=2, heads=4, kv_heads=2, width=8, value=8):
    shapes = (batch, seq, heads, width), (batch, seq, kv_heads, width), (batch, seq, kv_heads, value)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    documents = np.sort(rng.integers(0, 3, (batch, seq)), axis=1).astype(np.int32)
    return q, k, v, documents, rng.normal(size=heads).astype(np.float32)


def with_gradients(attend, q, k, v, documents, sinks, weight):
    """Output, and gradients of a weighted sum of it."""

    def loss(q, k, v, sinks):
        out = attend(q, k, v, documents, sinks)
        return jnp.sum(out * weight), out

    chosen = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    (_, out), gradients = jax.value_and_grad(loss, chosen, has_aux=True)(q, k, v, sinks)
    return out, *gradients


def ring(placement, size, config, seq):
    """The reference's function of whole sequences in natural order, by a ring of `size` devices."""
    way, places = route(("context",), size, config.mask, seq), zigzag(size, seq)
    assert not isinstance(way, str)
    spec = PartitionSpec(None, "context")

    def attend(q, k, v, documents, sinks):
        local = lambda q, k, v, documents, sinks: ring_attention(q, k, v, config, way, documents, sinks)  # noqa: E731
        specs = (spec, spec, spec, spec, PartitionSpec())
        stored = (axes.reshard(x[:, places], spec) for x in (q, k, v, documents))
        out = axes.per_device(local, specs, spec)(*stored, sinks)
        return axes.reshard(out, PartitionSpec())[:, np.argsort(places)]

    return attend


def check(placed, compiled, rng, size, config, seq, sinks=True, **sizes):
    q, k, v, documents, of_heads = operands(rng, seq, **sizes)
    of_heads = of_heads if sinks else None
    weight = rng.normal(size=(*q.shape[:3], v.shape[3])).astype(np.float32)
    problem = (q, k, v, documents, of_heads, weight)
    placement = placed({"context": size})
    ours = compiled(placement, lambda *o: with_gradients(ring(placement, size, config, seq), *o), *problem)
    whole = lambda q, k, v, documents, sinks: attention_reference(  # noqa: E731
        q, k, v, config, AttentionInputs((documents, documents), sinks=sinks)
    )[0]
    for one, other in zip(ours, jax.jit(lambda *o: with_gradients(whole, *o))(*problem), strict=True):
        assert np.linalg.norm(one - other) <= 3e-6 * max(np.linalg.norm(other), 1.0)


@pytest.mark.few(size=(2,), mask=FULL[-1:])
@pytest.mark.some(size=(8,))
@pytest.mark.some(size=(4,), mask=FULL[-1:])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("mask", FULL, ids=str)
def test_a_ring_is_attention_over_the_whole_sequence(mask, size, rng, placed, compiled):
    check(placed, compiled, rng, size, AttentionConfig(mask, 0.4), 2 * size * int(rng.integers(1, 7)))


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_ring_of_products_in_fp8_is_one_devices(rng, placed, compiled):
    """Chunks are of whole blocks, and weights are rounded alike whichever keys came first. Tolerance: some weights in
    10⁵ fall to the other neighbour in e4m3, 2⁻³ of themselves away, by rounding of float32."""
    seq, config = 1024, AttentionConfig(Causal() & SameDocument(), 0.4, products=FP8Products(emulate=True))
    q, k, v, documents, sinks = operands(rng, seq)
    problem = (q, k, v, documents, sinks, rng.normal(size=q.shape).astype(np.float32))
    placement = placed({"context": 2})
    ours = compiled(placement, lambda *o: with_gradients(ring(placement, 2, config, seq), *o), *problem)
    whole = lambda q, k, v, documents, sinks: attention_and_lse(  # noqa: E731
        q, k, v, config, AttentionInputs((documents, documents), sinks=sinks)
    )[0]
    for one, other in zip(ours, jax.jit(lambda *o: with_gradients(whole, *o))(*problem), strict=True):
        assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(other)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_ring_gives_cudnn_the_output_over_all_keys(rng, placed, compiled, monkeypatch):
    """From which, and not from what the ring computed, it takes D."""

    def gradients(q, k, v, config, inputs, rows, out):
        dout, lse, _ = rows
        return attention_gradients_reference(q, k, v, config, inputs, (dout, lse, jnp.sum(out * dout, axis=-1)))

    monkeypatch.setattr(attention, "_chosen", lambda *given: "cudnn")
    monkeypatch.setattr(attention.cudnn, "attention_cudnn", attention_reference)
    monkeypatch.setattr(attention.cudnn, "attention_gradients_cudnn", gradients)
    check(placed, compiled, rng, 2, AttentionConfig(FULL[-1], 0.4), 4 * int(rng.integers(1, 7)))


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.some(size=(2,), reach=(0.1, 1.0, 9.0))
@pytest.mark.some(size=(4,), reach=(1.5, 6.2))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("reach", [0.1, 0.7, 1.0, 1.5, 3.5, 6.2, 7.9, 9.0])
def test_a_window_is_met_by_the_chunks_that_it_reaches(reach, size, rng, placed, compiled):
    chunk = int(rng.integers(2, 7))
    window = max(1, round(reach * chunk) + int(rng.integers(-1, 2)))
    mask = Causal() & SameDocument() & Window(window)
    check(placed, compiled, rng, size, AttentionConfig(mask, 0.4), 2 * size * chunk)
