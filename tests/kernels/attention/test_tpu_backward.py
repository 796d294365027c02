"""The backward TPU kernel, interpreted on a CPU: the gradients of the reference, whatever tiles, blocks and spans."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    Prefix,
    SameDocument,
    Window,
    attention_reference,
)
from axon.kernels.attention.tiles import Tiles
from axon.kernels.attention.tpu import attention_gradients_tpu

TILES = Tiles(512, 512, 512, 512, rectangle=0)
"""Of float32 operands half that, 256 rows and keys; rectangles cost nothing, so that partly seen tiles are cut."""


def draw(rng, queries, keys, group, kv_heads=1, batch=1, width=64):
    shapes = (batch, queries, group * kv_heads, width), *[(batch, keys, kv_heads, width)] * 2
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return q, k, v, rng.normal(size=q.shape).astype(np.float32)


def check(operands, config, inputs, tiles=TILES, interpret=True):
    """Gradients of an output's cotangent against those of the reference."""
    q, k, v, dout = operands

    @jax.jit
    def reference(*operands):
        (out, lse), backward = jax.vjp(lambda *o: attention_reference(*o, config, inputs), *operands)
        return (dout, lse, jnp.sum(out * dout, axis=-1)), backward((dout, jnp.zeros_like(lse)))

    rows, expected = reference(q, k, v)
    ours = jax.jit(lambda *o: attention_gradients_tpu(*o, config, inputs, rows, tiles=tiles, interpret=interpret))(
        q, k, v
    )
    for one, other in zip(ours, expected, strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - other) / max(np.linalg.norm(other), 1e-3)
        assert error < 3e-6


def sizes(rng, *bounds):
    return [int(rng.integers(low, high)) for low, high in bounds]


def random_documents(rng, batch, *lengths):
    return tuple(np.sort(rng.integers(0, 3, (batch, length)), axis=1).astype(np.int32) for length in lengths)


MASKS = {
    "a narrow window": lambda a, b: Causal() & Window(1 + a % 100),
    "a window": lambda a, b: Causal() & Window(200 + a),
    "a window of later keys too": lambda a, b: Window(150 + a),
    "causal": lambda a, b: Causal(),
    "a prefix and a window": lambda a, b: Prefix(a) & Window(50 + b),
    "documents": lambda a, b: Causal() & SameDocument(),
    "documents in a window": lambda a, b: Causal() & SameDocument() & Window(100 + a),
    "all": lambda a, b: Everything(),
}


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_the_reference_s_for_every_mask_start_and_group(name, rng):
    queries, keys, a, b = sizes(rng, (300, 600), (300, 600), (0, 300), (0, 300))
    start, group = int(rng.integers(0, max(1, keys - 200))), int(2 ** rng.integers(0, 3))
    mask = MASKS[name](a, b)
    documents = random_documents(rng, 2, queries, keys) if mask.by_document else None
    check(draw(rng, queries, keys, group, batch=2), AttentionConfig(mask, 0.2), AttentionInputs(documents, start=start))


@pytest.mark.full
def test_one_head_is_cut_into_spans_for_two_cores(rng):
    length, tiles = int(rng.integers(600, 1100)), replace(TILES, cores=2)
    documents = random_documents(rng, 1, length, length)
    check(
        draw(rng, length, length, 2), AttentionConfig(Causal() & SameDocument(), 0.2), AttentionInputs(documents), tiles
    )


@pytest.mark.full
def test_documents_in_no_order_have_the_reference_s_gradients(rng):
    """A tile of queries may see tiles of keys that those before and after it do not, and none between."""
    queries, keys = sizes(rng, (500, 700), (600, 900))
    documents = rng.integers(0, 9, (2, queries // 100 + 1)), rng.integers(0, 9, (2, keys // 100 + 1))
    documents = tuple(
        np.repeat(d, 100, axis=1)[:, :n].astype(np.int32) for d, n in zip(documents, (queries, keys), strict=True)
    )
    check(draw(rng, queries, keys, 2, batch=2), AttentionConfig(SameDocument(), 0.2), AttentionInputs(documents))


@pytest.mark.full
def test_a_start_known_at_run_time_has_the_reference_s_gradients(rng):
    for mask in (Causal(), Causal() & Window(int(rng.integers(1, 300))), Prefix(100) & Window(200)):
        queries, keys, start = sizes(rng, (200, 300), (500, 800), (0, 500))
        check(draw(rng, queries, keys, 2), AttentionConfig(mask, 0.2), AttentionInputs(start=jnp.int32(start)))


@pytest.mark.full
def test_queries_before_and_after_all_keys_have_no_gradient_or_the_reference_s(rng):
    for start in (-400, 300):
        mask = Causal() & Window(int(rng.integers(20, 200)))
        check(draw(rng, 700, 400, 2), AttentionConfig(mask, 0.2), AttentionInputs(start=start))


@pytest.mark.full
def test_sinks_caps_and_slopes_have_the_reference_s_gradients(rng):
    length, group = int(rng.integers(300, 500)), 4
    sinks, slopes = rng.normal(size=group).astype(np.float32), rng.uniform(size=group).astype(np.float32)
    config = AttentionConfig(Causal() & Window(int(rng.integers(60, 200))), 0.2, soft_cap=2.0)
    check(draw(rng, length, length, group), config, AttentionInputs(sinks=sinks, alibi_slopes=slopes))


@pytest.mark.full
@pytest.mark.parametrize("case", [0, 1])
def test_no_read_is_out_of_bounds_and_no_copy_is_not_waited_for(case, rng, watched):
    """Also where a step has no tile of queries, or a span one less; the last documents begin within a tile."""
    length = 384 if case == 0 else int(rng.integers(600, 700))
    documents = (np.arange(length) >= 256).astype(np.int32)[None]
    mask = Causal() & SameDocument() & Window(120)
    tiles = Tiles(256, 256, 256, 256, cores=2, dq_vmem=2**20) if case == 0 else TILES
    inputs = AttentionInputs((documents, documents))
    check(draw(rng, length, length, 1), AttentionConfig(mask, 0.2), inputs, tiles, watched)
