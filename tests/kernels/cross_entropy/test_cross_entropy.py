"""Blocked cross-entropy: the formula's values and gradients, and never all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_and_gradients,
    cross_entropy_reference,
    xla,
)


def draw(rng, tokens, embed=8, vocab=24):
    x = rng.normal(size=(tokens, embed)).astype(np.float32)
    head = rng.normal(size=(embed, vocab)).astype(np.float32)
    targets = rng.integers(0, vocab, tokens, dtype=np.int32)
    weights = (rng.random(tokens) < 0.8).astype(np.float32)
    return x, head, targets, weights


def close(actual, expected, tolerance=2e-6):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    assert np.linalg.norm(actual - expected) <= tolerance * max(np.linalg.norm(expected), 1e-3)


def formula(x, head, targets, weights, z_loss):
    """float64: `(objective, nll, dx, dhead)`."""
    logits = x.astype(np.float64) @ head
    lse = np.log(np.exp(logits).sum(-1))
    nll = lse - np.take_along_axis(logits, targets[:, None], 1)[:, 0]
    hot = np.eye(head.shape[1])[targets]
    slope = weights[:, None] * (np.exp(logits - lse[:, None]) * (1 + 2 * z_loss * lse[:, None]) - hot)
    objective = np.sum(weights * (nll + z_loss * lse**2))
    return objective, np.sum(weights * nll), slope @ head.T, x.T @ slope


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_the_reference_is_the_formula(z_loss, rng):
    x, head, targets, weights = draw(rng, 20)
    objective, nll, dx, dhead = formula(x, head, targets, weights, z_loss)
    gradients = jax.grad(lambda x, h: cross_entropy_reference(x, h, targets, weights, z_loss)[0], (0, 1))
    made = cross_entropy_reference(x, head, targets, weights, z_loss)
    close(made[0], objective)
    close(made[1], nll)
    for one, other in zip(gradients(x, head), (dx, dhead), strict=True):
        close(one, other)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("tokens", [1, 2, 24, 37, 101])
def test_blocks_of_any_number_of_tokens_are_the_formula(tokens, z_loss, rng, monkeypatch):
    x, head, targets, weights = draw(rng, tokens)
    monkeypatch.setattr(xla, "CPU_BLOCK", 7 * head.shape[1] * 4)
    monkeypatch.setattr(xla, "CPU_TOKENS", 1)
    monkeypatch.setattr(xla, "CPU_PART", 300)  # so that the head's gradient is added to in three parts
    expected = formula(x, head, targets, weights, z_loss)
    sums, *gradients = cross_entropy_and_gradients(x, head, targets, weights, z_loss=z_loss)
    for one, other in zip((*sums, *gradients), expected, strict=True):
        close(one, other)
    for one, other in zip(cross_entropy(x, head, targets, weights, z_loss=z_loss), expected[:2], strict=True):
        close(one, other)


def test_a_prime_number_of_tokens_is_cut_into_few_blocks():
    for tokens in (509, 8191, 32749):
        assert xla._count(tokens, 32000) <= 2 * max(2, tokens * 32000 * 4 // xla.CPU_BLOCK + 1)


@pytest.mark.parametrize("tokens", [1024, 4096])
def test_at_a_vocabulary_of_128k_the_temporaries_are_an_eighth_of_the_formulas_at_most(tokens):
    shapes = ((tokens, 256), np.float32), ((256, 131072), np.float32), ((tokens,), np.int32), ((tokens,), np.float32)
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def naive(x, head, *rest):
        return jax.value_and_grad(lambda x, h: cross_entropy_reference(x, h, *rest)[0], (0, 1))(x, head)

    def temporaries(fn):
        return jax.jit(fn).lower(*operands).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(cross_entropy_and_gradients) <= temporaries(naive) / 8
    assert temporaries(cross_entropy) <= temporaries(cross_entropy_reference) / 4


def test_tokens_of_weight_zero_count_for_nothing_whatever_they_hold(rng):
    x, head, targets, weights = draw(rng, 30)
    changed = np.where(weights > 0, targets, rng.integers(-100, 100, 30)).astype(np.int32)
    other = np.where(weights[:, None] > 0, x, 1e3 * rng.normal(size=x.shape)).astype(np.float32)
    one, _, dhead = cross_entropy_and_gradients(x, head, targets, weights)
    two, dx, dhead_two = cross_entropy_and_gradients(other, head, changed, weights)
    close(two.objective, one.objective)
    close(dhead_two, dhead)
    np.testing.assert_array_equal(dx[weights == 0], 0)


def test_large_logits_do_not_overflow(rng):
    x, head, targets, weights = draw(rng, 16)
    sums, *gradients = cross_entropy_and_gradients(100 * x, head, targets, weights)
    assert all(np.all(np.isfinite(a)) for a in (*sums, *gradients))


def test_bf16_operands_accumulate_the_heads_gradient_in_float32(rng):
    x, head, targets, weights = draw(rng, 64)
    x16, head16 = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    sums, dx, dhead = cross_entropy_and_gradients(x16, head16, targets, weights)
    assert dx.dtype == jnp.bfloat16
    assert dhead.dtype == jnp.float32
    expected = formula(np.asarray(x16, np.float32), np.asarray(head16, np.float32), targets, weights, 0.0)
    for one, other in zip((*sums, dx, dhead), expected, strict=True):
        close(one, other, 1e-2)
