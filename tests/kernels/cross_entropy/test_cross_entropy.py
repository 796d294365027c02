"""Blocked cross-entropy: the formula's values and gradients, and never all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.kernels.cross_entropy import (
    Columns,
    blocks,
    cross_entropy,
    cross_entropy_and_gradients,
    cross_entropy_reference,
    products,
    token_nll,
    token_nll_gradients,
    token_nll_reference,
)

CAPS = [None, 1.5]
"""Of logits whose standard deviation is about 3: 1.5 bends nearly all of them."""


def draw(rng, tokens, embed=8, vocab=24):
    x = rng.normal(size=(tokens, embed)).astype(np.float32)
    head = rng.normal(size=(embed, vocab)).astype(np.float32)
    targets = rng.integers(0, vocab - 3, tokens, dtype=np.int32)
    weights = (rng.random(tokens) < 0.8).astype(np.float32)
    return x, head, targets, weights


def close(actual, expected, tolerance=2e-6):
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    assert np.linalg.norm(actual - expected) <= tolerance * max(np.linalg.norm(expected), 1e-3)


def all_close(actual, expected, tolerance=2e-6):
    for one, other in zip(actual, expected, strict=True):
        close(one, other, tolerance)


def formula(x, head, targets, soft_cap=None, vocab=None):
    """float64: `nll`, `lse`, and a function of their cotangents to `(dx, dhead)`."""
    x, head = x.astype(np.float64), head.astype(np.float64)
    logits = (x @ head)[:, :vocab]
    slope = np.ones_like(logits)
    if soft_cap is not None:
        logits, slope = soft_cap * np.tanh(logits / soft_cap), 1 / np.cosh(logits / soft_cap) ** 2
    lse = np.log(np.exp(logits).sum(-1))
    hot = np.eye(logits.shape[1])[targets]

    def gradients(of_nll, of_lse):
        bent = np.zeros((len(x), head.shape[1]))
        probabilities = np.exp(logits - lse[:, None])
        bent[:, :vocab] = slope * ((of_nll + of_lse)[:, None] * probabilities - of_nll[:, None] * hot)
        return bent @ head.T, x.T @ bent

    return lse - (logits * hot).sum(-1), lse, gradients


def formula_of_sums(x, head, targets, weights, z_loss, soft_cap=None, vocab=None):
    """float64: `(objective, nll, dx, dhead)`."""
    nll, lse, gradients = formula(x, head, targets, soft_cap, vocab)
    objective = np.sum(weights * (nll + z_loss * lse**2))
    return objective, np.sum(weights * nll), *gradients(weights, 2 * z_loss * weights * lse)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of seven tokens at 24 columns, and a head's gradient that is added to in three parts."""
    monkeypatch.setattr(blocks, "CPU_BLOCK", 7 * 24 * 4)
    monkeypatch.setattr(blocks, "CPU_TOKENS", 1)
    monkeypatch.setattr(products, "CPU_PART", 300)


@pytest.mark.parametrize("soft_cap", CAPS)
@pytest.mark.parametrize("vocab", [None, 21])
def test_the_references_are_the_formula(vocab, soft_cap, rng):
    x, head, targets, weights = draw(rng, 20)
    z_loss, of_nll, of_lse = 0.3, *rng.normal(size=(2, 20)).astype(np.float32)

    def sums(x, head):
        return cross_entropy_reference(x, head, targets, weights, z_loss, vocab, soft_cap)

    @jax.jit
    def of_sums_and_tokens(x, head):
        tokens, backward = jax.vjp(lambda x, h: token_nll_reference(x, h, targets, vocab, soft_cap), x, head)
        of_sums = jax.grad(lambda x, h: sums(x, h)[0], (0, 1))(x, head)
        return (*sums(x, head), *of_sums), (*tokens, *backward((of_nll, of_lse)))

    of_sums, of_tokens = of_sums_and_tokens(x, head)
    all_close(of_sums, formula_of_sums(x, head, targets, weights, z_loss, soft_cap, vocab))
    nll, lse, gradients = formula(x, head, targets, soft_cap, vocab)
    all_close(of_tokens, (nll, lse, *gradients(of_nll, of_lse)))


@pytest.mark.few(tokens=(37,))
@pytest.mark.few(tokens=(1,), z_loss=(0.3,))
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("tokens", [1, 2, 24, 37, 101])
def test_blocks_of_any_number_of_tokens_are_the_formula(tokens, z_loss, rng, small_blocks):
    x, head, targets, weights = draw(rng, tokens)
    expected = formula_of_sums(x, head, targets, weights, z_loss)
    sums, *gradients = cross_entropy_and_gradients(x, head, targets, weights, z_loss)
    all_close((*sums, *gradients), expected)
    all_close(cross_entropy(x, head, targets, weights, z_loss), expected[:2])


@pytest.mark.few(tokens=(1, 37))
@pytest.mark.parametrize("tokens", [1, 2, 24, 37, 101])
def test_each_tokens_loss_and_the_gradients_of_any_function_of_it_are_the_formula(tokens, rng, small_blocks):
    x, head, targets, _ = draw(rng, tokens)
    of_nll, of_lse = rng.normal(size=(2, tokens)).astype(np.float32)
    nll, lse, gradients = formula(x, head, targets)
    made = token_nll(x, head, targets)
    all_close(made, (nll, lse))
    all_close(token_nll_gradients(x, head, targets, made[1], of_nll, of_lse), gradients(of_nll, of_lse))


@pytest.mark.few(vocab=(21,))
@pytest.mark.parametrize("vocab", [None, 21])
def test_a_soft_cap_and_padded_columns_are_the_formula_in_both_forms(vocab, rng, small_blocks):
    x, head, targets, weights = draw(rng, 40)
    columns, of_nll, of_lse = Columns(vocab, soft_cap=1.5), *rng.normal(size=(2, 40)).astype(np.float32)
    sums, *made = cross_entropy_and_gradients(x, head, targets, weights, 0.3, columns)
    all_close((*sums, *made), formula_of_sums(x, head, targets, weights, 0.3, 1.5, vocab))
    nll, lse, gradients = formula(x, head, targets, 1.5, vocab)
    all_close(token_nll(x, head, targets, columns), (nll, lse))
    made = token_nll_gradients(x, head, targets, lse.astype(np.float32), of_nll, of_lse, columns)
    all_close(made, gradients(of_nll, of_lse))


def test_a_prime_number_of_tokens_is_cut_into_few_blocks():
    for tokens in (509, 8191, 32749):
        assert blocks._count(tokens, 32000) <= 2 * max(2, tokens * 32000 * 4 // blocks.CPU_BLOCK + 1)


@pytest.mark.few(tokens=(1024,))
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

    def by_token(x, head, targets, *of_results):
        nll, lse = token_nll(x, head, targets)
        return nll, lse, token_nll_gradients(x, head, targets, lse, *of_results)

    def naive_by_token(x, head, targets, *of_results):
        found, backward = jax.vjp(lambda x, h: token_nll_reference(x, h, targets), x, head)
        return *found, backward(of_results)

    operands.append(operands[-1])
    assert temporaries(by_token) <= temporaries(naive_by_token) / 8


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
    expected = formula_of_sums(np.asarray(x16, np.float32), np.asarray(head16, np.float32), targets, weights, 0.0)
    all_close((*sums, dx, dhead), expected, 1e-2)
