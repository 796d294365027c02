"""attention(): both implementations against softmax(q·kᵀ·scale)·v in float64, with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.kernels.attention import (
    AttentionConfig,
    AttentionInputs,
    Causal,
    Everything,
    Prefix,
    SameDocument,
    Window,
    attention,
    attention_reference,
    xla,
)
from axon.kernels.attention.reference import attention_gradients_reference
from axon.kernels.attention.xla import BLOCK, BLOCKS

MASKS = [
    Everything(),
    Causal(),
    Window(7),
    SameDocument(),
    Causal() & Window(70),
    Causal() & SameDocument(),
    Causal() & SameDocument() & Window(40),
    Prefix(30),
]


def attention_xla(q, k, v, mask, documents, start, scale):
    return xla.attention_xla(q, k, v, AttentionConfig(mask, scale), AttentionInputs(documents, start))[0]


def reference(q, k, v, mask, documents, start, scale):
    return attention_reference(q, k, v, AttentionConfig(mask, scale), AttentionInputs(documents, start))[0]


CONSTANT = ("mask", "start", "scale")

IMPLEMENTATIONS = [jax.jit(one, static_argnames=CONSTANT) for one in (attention_xla, reference)]

CAUSAL = AttentionConfig(Causal(), 0.4)


def dense(q, k, v, mask, documents, start, scale):
    """The formula, pair by pair, in float64 NumPy; zeros where nothing is seen."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    i, j = start + np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None, :]
    seen = np.ones((q.shape[0], *np.broadcast_shapes(i.shape, j.shape)), bool)
    for part in str(mask).split(" & "):
        if part == "causal":
            seen &= j <= i
        elif part.startswith("window"):
            seen &= i - j < int(part.split()[1])
        elif part.startswith("prefix"):
            seen &= (j <= i) | (j < int(part.split()[1]))
        elif part == "same document" and documents is not None:
            seen &= documents[0][:, :, None] == documents[1][:, None, :]
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights / np.where(total == 0, 1, total), v)


def draw(rng, queries, keys, heads=4, kv_heads=2, batch=2):
    shapes = (batch, queries, heads, 8), (batch, keys, kv_heads, 8), (batch, keys, kv_heads, 8)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    documents = np.sort(rng.integers(0, 3, (batch, keys)), axis=1).astype(np.int32)
    return q, k, v, documents


def relative(actual, expected):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.few(length=(BLOCK + 13,), implementation=IMPLEMENTATIONS[:1])
@pytest.mark.few(length=(BLOCK + 13,), mask=(MASKS[0], *MASKS[-2:]))
@pytest.mark.few(length=(1,), mask=MASKS[-2:-1])
@pytest.mark.parametrize("length", [1, 40, BLOCK + 13])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_is_the_formula(implementation, mask, length, rng):
    q, k, v, documents = draw(rng, length, length)
    made = implementation(q, k, v, mask, (documents, documents), 0, 0.4)
    assert relative(made, dense(q, k, v, mask, (documents, documents), 0, 0.4)) < 1e-6


@pytest.mark.few(kv_heads=(2,))
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_group_of_heads_shares_one_head_of_keys(implementation, kv_heads, rng):
    q, k, v, _ = draw(rng, 9, 9, kv_heads=kv_heads)
    assert relative(implementation(q, k, v, Causal(), None, 0, 1.0), dense(q, k, v, Causal(), None, 0, 1.0)) < 1e-6


@pytest.mark.full
def test_gradients_do_not_depend_on_whether_the_start_is_traced(rng):
    length, start = BLOCK + 13, int(rng.integers(1, 30))
    q, k, v, documents = draw(rng, length, length + 30)
    pairs, weight = (documents[:, start : start + length], documents), rng.normal(size=q.shape).astype(np.float32)

    def loss(start, *operands):
        return jnp.sum(attention_xla(*operands, Causal() & SameDocument(), pairs, start, 0.4) * weight)

    gradients = jax.grad(loss, argnums=(1, 2, 3))
    for one, other in zip(jax.jit(gradients)(start, q, k, v), gradients(start, q, k, v), strict=True):
        assert relative(one, other) < 2e-6


@pytest.mark.few(implementation=IMPLEMENTATIONS[:1])
@pytest.mark.parametrize("mask", [*MASKS[:3], Causal() & Window(3)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_queries_that_start_later_see_the_keys_before_them(implementation, mask, rng):
    start = int(rng.integers(1, 30))
    q, k, v, _ = draw(rng, 10, 40)
    made = implementation(q, k, v, mask, None, start, 0.4)
    assert relative(made, dense(q, k, v, mask, None, start, 0.4)) < 1e-6


@pytest.mark.few(length=(BLOCK + 13,), mask=MASKS[-1:])
@pytest.mark.parametrize("kept", [True, False], ids=["weights kept", "weights made again"])
@pytest.mark.parametrize("length", [24, BLOCK + 13])
@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_gradients_of_the_blocks_are_those_of_the_formula(mask, length, kept, rng, monkeypatch):
    monkeypatch.setattr(xla, "SAVED", length if kept else 0)
    q, k, v, documents = draw(rng, length, length)
    weight = rng.normal(size=q.shape).astype(np.float32)

    def gradients(implementation, *operands):
        objective = lambda q, k, v: jnp.sum(implementation(q, k, v, mask, (documents,) * 2, 0, 0.4) * weight)  # noqa: E731
        return jax.jit(jax.grad(objective, argnums=(0, 1, 2)))(*operands)

    ours = gradients(attention_xla, q, k, v)
    plain = gradients(reference, q, k, v)
    for one, other in zip(ours, plain, strict=True):
        assert relative(one, other) < 2e-6
    along = [rng.normal(size=a.shape) for a in (q, k, v)]
    formula = functools.partial(dense, mask=mask, documents=(documents,) * 2, start=0, scale=0.4)
    step = 1e-5
    ahead, behind = (formula(*(a + s * d for a, d in zip((q, k, v), along, strict=True))) for s in (step, -step))
    expected = np.sum((ahead - behind) * weight) / (2 * step)
    size = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in ours) * sum(np.sum(d**2) for d in along))
    made = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(ours, along, strict=True))
    assert abs(made - expected) < 1e-5 * size


def test_scanned_and_rematerialised_layers_have_the_same_gradients_as_unrolled_ones(rng, monkeypatch):
    monkeypatch.setattr(xla, "SAVED", 0)
    q, k, v, documents = draw(rng, 40, 40, heads=2, kv_heads=2)

    def layer(x, documents):
        return x + attention_xla(x, k, v, Causal() & SameDocument(), (documents, documents), 0, 0.4)

    def scanned(x, documents):
        body = jax.checkpoint(lambda x, _: (layer(x, documents), None))
        return jnp.sum(jnp.sin(jax.lax.scan(body, x, None, length=2)[0]))

    unrolled = lambda x, documents: jnp.sum(jnp.sin(layer(layer(x, documents), documents)))  # noqa: E731
    assert relative(*(jax.jit(jax.grad(f))(q, documents) for f in (scanned, unrolled))) < 1e-6


@pytest.mark.few(implementation=IMPLEMENTATIONS[:1])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients(implementation, rng):
    q, k, v, documents = draw(rng, 12, 12)
    asked = documents.copy()
    asked[:, 5] = 9  # a document that no key has
    only_that = np.zeros_like(q)
    only_that[:, 5] = rng.normal(size=q[:, 5].shape)

    @jax.jit
    def with_gradients(*operands):
        run = lambda *o: implementation(*o, Causal() & SameDocument(), (asked, documents), 0, 0.4)  # noqa: E731
        out, backward = jax.vjp(run, *operands)
        return out, *backward(only_that)

    out, *gradients = with_gradients(q, k, v)
    np.testing.assert_array_equal(out[:, 5], 0)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_queries_beyond_the_last_key_that_a_window_reaches_give_zeros(implementation, rng):
    q, k, v, _ = draw(rng, 4, 8)
    np.testing.assert_array_equal(implementation(q, k, v, Causal() & Window(2), None, 20, 0.4), 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bf16_operands_give_bf16_within_their_rounding(implementation, rng):
    q, k, v, _ = draw(rng, 50, 50)
    q, k, v = (a.astype(jnp.bfloat16) for a in (q, k, v))
    made = implementation(q, k, v, Causal(), None, 0, 0.4)
    assert made.dtype == jnp.bfloat16
    assert relative(made, dense(q, k, v, Causal(), None, 0, 0.4)) < 6e-3


def test_no_array_is_as_large_as_queries_times_keys_and_causal_blocks_stop_at_the_diagonal(rng):
    length = BLOCK * BLOCKS
    q, k, v, _ = draw(rng, length, length, heads=2, kv_heads=2, batch=1)
    run = jax.grad(lambda q: attention_xla(q, k, v, Causal(), None, 0, 1.0).sum())
    text = jax.jit(run).lower(q).as_text()
    assert f"<2x{BLOCK}x{length}xf32" in text, "the last block sees every key"
    assert f"<2x{BLOCK}x{BLOCK}xf32" in text, "the first block only its own"
    assert f"{length}x{length}x" not in text


@pytest.mark.few(slopes=(True,))
@pytest.mark.parametrize("slopes", [False, True])
def test_a_traced_start_takes_plain_xla_and_has_the_values_and_gradients_of_a_constant(slopes, rng, placed):
    from axon import axes

    q, k, v, _ = draw(rng, 3, 12)
    given = {"alibi_slopes": rng.normal(size=4).astype(np.float32)} if slopes else {}

    def with_gradients(attend):
        out, backward = jax.vjp(attend, q, k, v)
        return out, *backward(out)

    def traced(start):
        return with_gradients(lambda *operands: attention(*operands, Causal(), start=start, scale=0.4, **given))

    def constant():
        return with_gradients(lambda *x: attention_reference(*x, CAUSAL, AttentionInputs(start=4, **given))[0])

    with axes.activate(axes.Scope(placed())) as scope:
        made = jax.jit(traced)(np.int32(4))
    assert scope.choices["attention"].startswith("xla, causal")
    for one, other in zip(made, jax.jit(constant)(), strict=True):
        assert relative(one, other) < 3e-6


def test_scores_of_bf16_queries_are_scaled_in_float32(rng):
    q, k, v, _ = draw(rng, 50, 50)
    q, k, v = (a.astype(jnp.bfloat16) for a in (q, k, v))
    found = jax.jit(lambda *o: xla.attention_xla(*o, CAUSAL)[1])(q, k, v)
    exact = jax.jit(lambda *o: attention_reference(*o, CAUSAL)[1])(*(np.asarray(a, np.float32) for a in (q, k, v)))
    assert relative(found, exact) < 1e-6


def test_heads_that_do_not_group_are_refused(rng):
    q, k, v, _ = draw(rng, 3, 3, heads=4, kv_heads=3)
    with pytest.raises(UserError, match="4 heads are not a multiple of 3 kv_heads"):
        attention(q, k, v, Causal())


BAD = {
    "keys are 2 × 8 × 2 × 8 and values 2 × 7 × 2 × 8": lambda q, k, v: attention(q, k, v[:, :7], Causal()),
    "queries are 2 × 8 × 4 × 8 and keys 2 × 8 × 2 × 6": lambda q, k, v: attention(q, k[..., :6], v, Causal()),
    "soft_cap is 0.0; must be above 0": lambda q, k, v: attention(q, k, v, Causal(), soft_cap=0.0),
    "sinks are 2; there are 4 heads": lambda q, k, v: attention(q, k, v, Causal(), sinks=np.zeros(2)),
    "documents are 2 × 3 for 2 sequences of 8": lambda q, k, v: attention(
        q, k, v, SameDocument(), documents=(np.zeros((2, 3)), np.zeros((2, 8)))
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_operands_that_do_not_go_together_are_refused_with_their_sizes(message, rng):
    with pytest.raises(UserError, match=message):
        BAD[message](*draw(rng, 8, 8)[:3])


FEATURES = [
    {"soft_cap": 2.0},
    {"sinks": True},
    {"alibi_slopes": True},
    {"soft_cap": 3.0, "sinks": True, "alibi_slopes": True},
]


@pytest.mark.few(features=FEATURES[-1:], kept=(False,))
@pytest.mark.parametrize("kept", [True, False], ids=["weights kept", "weights made again"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_caps_sinks_and_slopes_and_the_log_sum_exp_have_the_gradients_of_the_formula(features, kept, rng, monkeypatch):
    monkeypatch.setattr(xla, "SAVED", 10**6 if kept else 0)
    q, k, v, documents = draw(rng, 80, 80)
    config = AttentionConfig(Causal() & SameDocument() & Window(50), 0.4, features.get("soft_cap"))
    sinks, alibi_slopes = (
        rng.normal(size=4).astype(np.float32) if name in features else None for name in ("sinks", "alibi_slopes")
    )
    weights = [rng.normal(size=shape).astype(np.float32) for shape in (q.shape, q.shape[:3])]

    def run(implementation):
        def objective(q, k, v, sinks):
            made = implementation(q, k, v, config, AttentionInputs((documents,) * 2, 0, sinks, alibi_slopes))
            return sum(jnp.sum(a * w) for a, w in zip(made, weights, strict=True)), made

        operands = (q, k, v, sinks)[: 4 if "sinks" in features else 3]
        function = jax.value_and_grad(lambda *x: objective(*x, *(None,) * (4 - len(x))), range(len(operands)), True)
        (_, made), gradients = jax.jit(function)(*operands)
        return *made, *gradients

    for one, other in zip(run(xla.attention_xla), run(attention_reference), strict=True):
        assert relative(one, other) < 3e-6


def test_the_reference_has_caps_sinks_and_slopes_as_their_papers_say(rng):
    q, k, v, _ = draw(rng, 20, 20, heads=2, kv_heads=2, batch=1)
    sinks, alibi_slopes = rng.normal(size=2), rng.normal(size=2)
    config = AttentionConfig(Causal(), 0.4, 2.0)
    attend = jax.jit(lambda *o: attention_reference(*o[:3], config, AttentionInputs(None, 0, *o[3:])))
    made, lse = attend(q, k, v, sinks, alibi_slopes)
    at, to = np.arange(20)[:, None], np.arange(20)[None, :]
    for head in range(2):
        scores = 2.0 * np.tanh(0.4 * q[0, :, head].astype(float) @ k[0, :, head].T / 2.0) + alibi_slopes[head] * (
            to - at
        )
        powers = np.where(to <= at, np.exp(scores), 0)
        total = powers.sum(axis=1, keepdims=True) + np.exp(sinks[head])
        assert relative(made[0, :, head], powers / total @ v[0, :, head]) < 1e-6
        assert relative(lse[0, :, head], np.log(total[:, 0])) < 1e-6


def test_parts_of_the_keys_merge_by_their_log_sum_exps(rng):
    q, k, v, _ = draw(rng, 30, 30)

    @jax.jit
    def whole_near_and_far(q, k, v):
        return (
            xla.attention_xla(q, k, v, CAUSAL),
            xla.attention_xla(q, k[:, :11], v[:, :11], CAUSAL),
            xla.attention_xla(q, k[:, 11:], v[:, 11:], CAUSAL, AttentionInputs(start=-11)),
        )

    (whole, lse), near, far = whole_near_and_far(q, k, v)
    together = np.logaddexp(near[1], far[1])
    assert relative(together, lse) < 1e-6
    merged = sum(out * np.exp(part - together)[..., None] for out, part in (near, far))
    assert relative(merged, whole) < 1e-6


def check_parts(rng, operands, documents, forward, gradients, bound=3e-6):
    """Gradients over two parts of the keys, each told the log-sum-exp and D over both, against those over all."""
    (q, k, v), cut = operands, int(rng.integers(1, operands[1].shape[1]))
    config = AttentionConfig(Causal() & SameDocument() & Window(int(rng.integers(1, 2 * cut + 2))), 0.4, 1.5)
    dout, dlse = rng.normal(size=(*q.shape[:3], v.shape[3])), rng.normal(size=q.shape[:3])
    dout, dlse = dout.astype(np.float32), dlse.astype(np.float32)
    whole = AttentionInputs((documents, documents))

    @jax.jit
    def of_parts_and_whole(q, k, v):
        (out, lse), backward = jax.vjp(lambda *o: forward(*o, config, whole), q, k, v)
        rows = dout, lse, jnp.sum(out * dout, axis=-1) - dlse

        def part(first, last):
            of_part = AttentionInputs((documents, documents[:, first:last]), -first)
            return gradients(q, k[:, first:last], v[:, first:last], config, of_part, rows)

        (dq, *first), (more, *last) = part(0, cut), part(cut, k.shape[1])
        both = (jnp.concatenate(pair, axis=1) for pair in zip(first, last, strict=True))
        return (dq + more, *both), backward((dout, dlse))

    for one, other in zip(*of_parts_and_whole(q, k, v), strict=True):
        assert relative(one, other) < bound


@pytest.mark.parametrize(
    ("forward", "gradients"),
    [
        (xla.attention_xla, xla.attention_gradients_xla),
        pytest.param(attention_reference, attention_gradients_reference, marks=pytest.mark.full),
    ],
)
def test_gradients_over_parts_of_the_keys_add_up(forward, gradients, rng):
    q, k, v, documents = draw(rng, BLOCK + 13, BLOCK + 13)
    check_parts(rng, (q, k, v), documents, forward, gradients)
