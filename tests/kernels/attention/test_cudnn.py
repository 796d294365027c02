"""cuDNN's attention: what is said to it, computed by the meaning that it documents, is the reference's attention.

No GPU is needed: the two calls are replaced by plain products of what they were given.
"""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon import axes
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    Prefix,
    SameDocument,
    Window,
    attention_and_lse,
    attention_gradients,
    attention_part,
    attention_reference,
    cudnn,
)
from axon.kernels.attention.reference import attention_gradients_reference

MASKS = [
    Everything(),
    Causal(),
    Causal() & Window(20),
    Causal() & SameDocument(),
    Causal() & SameDocument() & Window(20),
    Prefix(30),
    Window(20),
    SameDocument() & Window(20),
]
QUERIES = KEYS = 64


def scores(q, k, bias, scale, form):
    """cuDNN's: scaled products, plus the bias, of the pairs that its causal mask and its window leave."""
    group = q.shape[2] // k.shape[2]
    found = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, group, axis=2)).astype(jnp.float32) * scale
    found = found if bias is None else found + bias.astype(jnp.float32)
    ahead = jnp.arange(k.shape[1])[None, :] - jnp.arange(q.shape[1])[:, None]
    assert form.causal or form.window is None  # without a causal mask it has no window
    found = jnp.where(ahead > 0, -jnp.inf, found) if form.causal else found
    return found if form.window is None else jnp.where(ahead <= -form.window, -jnp.inf, found)


def plain_forward(q, k, v, bias, scale, form):
    found = scores(q, k, bias, scale, form)
    lse = jax.nn.logsumexp(found, axis=-1)
    values = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(found - lse[..., None]), values).astype(q.dtype), lse


def plain_backward(q, k, v, bias, rows, scale, form):
    lse, out, dout = rows
    group = q.shape[2] // k.shape[2]
    found, products = jax.vjp(lambda q, k: scores(q, k, bias, scale, form), q, k)
    weights = jnp.exp(found - lse[..., None])
    total = jnp.einsum("bqhd,bqhd->bhq", out, dout)[..., None]
    dscores = weights * (jnp.einsum("bqhd,bkhd->bhqk", dout, jnp.repeat(v, group, axis=2)) - total)
    dv = jnp.einsum("bhqk,bqhd->bkhd", weights, dout).reshape(*v.shape[:3], group, -1).sum(3)
    return *products(dscores), dv


@pytest.fixture
def plain(monkeypatch):
    """cuDNN's calls as plain products, which take float32 too: its rounding is not what is asked about."""
    monkeypatch.setattr(cudnn, "call_forward", plain_forward)
    monkeypatch.setattr(cudnn, "call_backward", plain_backward)
    monkeypatch.setattr(cudnn, "DTYPES", (jnp.float32,))
    monkeypatch.setattr(cudnn, "HIDDEN", {"float32": -(2.0**41)})


@pytest.fixture
def h200():
    placement: Any = SimpleNamespace(platform="gpu", chip="NVIDIA H200 141GB HBM3e")
    with axes.activate(axes.Scope(placement)) as scope:
        yield scope


def draw(rng, queries=QUERIES, keys=KEYS, heads=4, kv_heads=2, width=16) -> Any:
    shapes = (2, queries, heads, width), (2, keys, kv_heads, width), (2, keys, kv_heads, width)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    documents = np.sort(rng.integers(0, 4, (2, keys)), axis=1).astype(np.int32)
    return q, k, v, documents


def relative(actual, expected):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def check(rng, operands, config, inputs, of_lse=1.0):
    """Output, log-sum-exp and gradients, of sinks too, against the reference's."""
    weights = jnp.asarray(rng.normal(size=operands[0].shape)), of_lse * rng.normal(size=operands[0].shape[:3])

    def run(implementation):
        def objective(q, k, v, sinks):
            out, lse = implementation(q, k, v, config, inputs._replace(sinks=sinks))
            total = jnp.sum(out * weights[0])
            return total + jnp.sum(jnp.where(jnp.isinf(lse), 0, lse) * weights[1]) if of_lse else total, (out, lse)

        return jax.jit(jax.grad(objective, argnums=(0, 1, 2) + (3,) * (inputs.sinks is not None), has_aux=True))(
            *operands, inputs.sinks
        )

    (ours, (out, lse)), (exact, (exact_out, exact_lse)) = run(attention_and_lse), run(attention_reference)
    assert relative(out, exact_out) < 2e-6
    np.testing.assert_allclose(lse, exact_lse, rtol=2e-6, atol=2e-6)
    for one, other in zip(ours, exact, strict=True):
        assert relative(one, other) < 5e-6


@pytest.mark.few(mask=(MASKS[2], MASKS[-1]))
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_is_said_to_cudnn_is_the_mask(mask, plain, h200, rng):
    q, k, v, documents = draw(rng)
    check(rng, (q, k, v), AttentionConfig(mask, 0.3), AttentionInputs((documents, documents)), of_lse=0.0)
    assert h200.choices["attention"].startswith(f"cudnn, {mask}")


@pytest.mark.few(mask=(Causal() & Window(20), Prefix(30)), traced=(True,))
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(20), Prefix(30)], ids=str)
def test_queries_that_start_later_see_the_keys_before_them(mask, traced, plain, h200, rng):
    start = int(rng.integers(1, 30))
    q, k, v, _ = draw(rng, keys=QUERIES + 30)
    inputs = AttentionInputs(start=jnp.int32(start) if traced else start)
    check(rng, (q, k, v), AttentionConfig(mask, 0.3), inputs, of_lse=0.0)


def test_queries_that_see_no_key_give_zeros_and_no_gradients(plain, h200, rng):
    q, k, v, documents = draw(rng)
    inputs = AttentionInputs((documents + 2, documents))
    out, lse = jax.jit(lambda *o: attention_and_lse(*o, AttentionConfig(SameDocument(), 0.3), inputs))(q, k, v)
    unseen = ~np.any((documents + 2)[:, :, None] == documents[:, None, :], axis=2)
    assert unseen.any()
    assert np.all(np.asarray(out)[unseen] == 0)
    assert np.all(np.asarray(lse)[unseen] == -np.inf)
    check(rng, (q, k, v), AttentionConfig(SameDocument(), 0.3), inputs, of_lse=0.0)


@pytest.mark.few(mask=(Causal(),))
@pytest.mark.parametrize("mask", [Causal(), Causal() & SameDocument()], ids=str)
def test_a_sink_takes_part_in_the_softmax_and_has_a_gradient(mask, plain, h200, rng):
    q, k, v, documents = draw(rng)
    inputs = AttentionInputs((documents, documents), sinks=jnp.asarray(rng.normal(size=4), jnp.float32))
    check(rng, (q, k, v), AttentionConfig(mask, 0.3), inputs, of_lse=0.0)


def test_a_log_sum_exp_that_is_differentiated_too_has_the_plain_gradient_and_it_is_said(plain, h200, rng):
    q, k, v, documents = draw(rng)
    inputs = AttentionInputs((documents, documents), sinks=jnp.asarray(rng.normal(size=4), jnp.float32))
    check(rng, (q, k, v), AttentionConfig(Causal() & SameDocument(), 0.3), inputs)
    said = "xla, causal & same document (not cudnn: the log-sum-exp is differentiated too)"
    assert h200.choices["attention gradient"] == said


def test_gradients_of_a_part_of_the_keys_are_the_reference_s(plain, h200, rng):
    """Of the rows that some other part of the keys made, a few of which count for nothing."""
    q, k, v, documents = draw(rng)
    config, inputs = AttentionConfig(Causal() & SameDocument(), 0.3), AttentionInputs((documents, documents))
    noise, dout = rng.normal(size=(2, *q.shape)).astype(np.float32)
    nothing = rng.random(q.shape[:3]) < 0.1

    @jax.jit
    def ours_and_exact(*operands):
        out, lse = attention_part(*operands, config, inputs)
        out, lse = out + noise, jnp.where(nothing, jnp.inf, lse + 0.7)
        rows = dout, lse, jnp.sum(out * dout, axis=-1)
        exact = attention_gradients_reference(*operands, config, inputs, rows)
        return attention_gradients(*operands, config, inputs, rows, out), exact

    for one, other in zip(*ours_and_exact(q, k, v), strict=True):
        assert relative(one, other) < 5e-6
    assert h200.choices["attention"].startswith("cudnn")
    rows = dout, nothing.astype(np.float32), nothing.astype(np.float32)
    jax.eval_shape(lambda *operands: attention_gradients(*operands, config, inputs, rows), q, k, v)
    assert "not cudnn: it takes D from the output" in h200.choices["attention"]


def refusal(chip="NVIDIA H200 141GB HBM3e", dtype=jnp.bfloat16, width=128, value=None, seq=128, mask=Causal(), **more):
    cap = more.pop("soft_cap", None)
    q, k, v = (jnp.zeros((1, seq, 1, size), dtype) for size in (width, width, value or width))
    inputs = AttentionInputs(**more)
    return cudnn.unsupported(q, k, v, AttentionConfig(mask, 1.0, cap), inputs, chip)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ({}, None),
        ({"dtype": jnp.float16}, None),
        ({"width": 256}, None),
        ({"width": 192, "value": 128}, None),
        ({"seq": 127}, None),
        ({"chip": "NVIDIA A100-SXM4-40GB"}, None),
        ({"dtype": jnp.float32}, "it computes in bfloat16 or float16, not float32"),
        ({"soft_cap": 50.0}, "it has no soft cap"),
        ({"alibi_slopes": np.ones(4)}, "it adds no slopes"),
        ({"width": 60}, "multiples of 8 up to 256"),
        ({"width": 128, "value": 64}, r"not 128 \(values 64\)"),
        ({"width": 192, "chip": "NVIDIA A100-SXM4-40GB"}, "multiples of 8 up to 128, not 192"),
        ({"chip": "AMD Instinct MI300X"}, "for NVIDIA GPUs, not AMD"),
        ({"seq": 127, "mask": Prefix(9)}, "even lengths, not 127 queries"),
        ({"seq": 32768}, None),
        ({"seq": 32768, "mask": Prefix(9)}, r"a bias, here of 2\.0 GiB: 1 at most"),
    ],
)
def test_what_does_not_fit_says_why(problem, said):
    found = refusal(**problem)
    assert found is None if said is None else re.search(said, found or "")


def test_few_queries_take_plain_products(h200, rng):
    q, k, v, _ = draw(rng, queries=8)
    inputs = AttentionInputs(start=KEYS - 8)
    jax.eval_shape(lambda *operands: attention_and_lse(*operands, AttentionConfig(Causal(), 0.3), inputs), q, k, v)
    assert "not cudnn: 8 queries would leave most of a tile empty" in h200.choices["attention"]
