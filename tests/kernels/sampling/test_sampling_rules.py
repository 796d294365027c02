"""Which tokens the filters keep: every implementation against the definition in float64, ties and all."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon import axes
from axon.kernels.sampling import Rules, least_kept_reference, least_kept_tpu, least_kept_xla, tpu
from axon.kernels.sampling.search import search, search_digits

BATCH, VOCAB = 3, 700
IMPLEMENTATIONS = ["reference", "xla", pytest.param("xla on a GPU", marks=pytest.mark.full), "tpu"]


def on_a_gpu(logits, rules):
    """As a program for a GPU has it, run here."""
    placement: Any = SimpleNamespace(platform="gpu")
    with axes.activate(axes.Scope(placement)):
        return least_kept_xla(logits, rules)


def least_of(name):
    functions = {
        "reference": least_kept_reference,
        "xla": least_kept_xla,
        "xla on a GPU": on_a_gpu,
        "tpu": lambda logits, rules: least_kept_tpu(logits, rules, interpret=True),
    }

    def least(logits, *settings):
        rules = Rules.of(logits, *settings)
        return rules.least_of(functions[name](logits, rules))

    return jax.jit(least)


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def least(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "CHUNK", 256)  # so that a row is whole chunks and a rest
        yield least_of(request.param)


def asked(temperature: Any = 1, top_k: Any = 0, top_p: Any = 1, min_p: Any = 0):
    """Settings of each request; those that are not given change nothing."""
    given = zip((temperature, top_k, top_p, min_p), (np.float32, np.int32, np.float32, np.float32), strict=True)
    return [np.broadcast_to(np.asarray(value, dtype), BATCH) for value, dtype in given]


def kept(logits, temperature, top_k, top_p, min_p):
    """The definition, for one request: booleans `vocab`."""
    x = logits.astype(np.float64)
    powers = np.exp((x - x.max()) / (temperature or 1))
    k = len(x) if temperature == 0 or not 1 <= top_k <= len(x) else top_k
    held = x >= np.sort(x)[-k]
    if temperature and top_p < 1:
        above = np.array([powers[held & (x > one)].sum() for one in x])
        held &= (above < top_p * powers[held].sum()) | (x == x.max())
    return held & ((powers >= min_p) | (x == x.max()))


def agree(least, logits, *settings):
    """What is kept is between what slightly smaller and slightly larger shares would keep, as sums are rounded."""
    found = logits >= np.asarray(least(logits, *settings))[:, None]
    for row, *rules, mine in zip(logits, *settings, found, strict=True):
        fewer = kept(row, *rules[:2], rules[2] * (1 - 1e-5), rules[3] * (1 + 1e-5))
        more = kept(row, *rules[:2], rules[2] * (1 + 1e-5), rules[3] * (1 - 1e-5))
        assert np.all(fewer <= mine)
        assert np.all(mine <= more)


@given(st.data())
@settings(max_examples=30)
def test_what_is_kept_is_what_the_definition_keeps(least, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    values = data.draw(st.sampled_from([2, 20, 100_000]))  # few values: many ties
    logits = (rng.integers(-values, values, (BATCH, VOCAB)) / values * data.draw(st.sampled_from([0.1, 5, 80]))).astype(
        np.float32
    )
    logits[rng.random(logits.shape) < data.draw(st.sampled_from([0, 0.5]))] = -np.inf
    logits[:, rng.integers(VOCAB)] = 1.0
    agree(
        least,
        logits,
        *asked(
            rng.choice([0, 0.3, 1, 4], BATCH),
            rng.choice([-1, 0, 1, 2, 50, VOCAB, 10**6], BATCH),
            rng.choice([0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1], BATCH),
            rng.choice([0, 1e-4, 0.3, 1], BATCH),
        ),
    )


def test_top_k_is_exact_for_logits_of_every_size_and_sign(least, rng):
    spread = np.float32(2.0) ** rng.integers(-100, 100, (BATCH, VOCAB))
    logits = (rng.choice([-1, 1], spread.shape) * spread * rng.random(spread.shape)).astype(np.float32)
    logits[:, :3] = [0.0, -0.0, -np.inf]
    for k in (1, 3, 350, 698, 699, 700):
        found = least(logits, *asked(top_k=k))
        np.testing.assert_array_equal(found, -np.sort(-logits, axis=1)[:, k - 1])


def test_the_shares_of_top_p_are_of_what_top_k_left(least):
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1] + [1e-30] * (VOCAB - 4)] * BATCH, np.float32))
    # Of all 0.5 + 0.25 hold 0.7, of the two likeliest 0.5 holds 0.65.
    both = least(logits, *asked(top_k=[0, 2, 2], top_p=[0.7, 0.7, 0.65]))
    np.testing.assert_array_equal(np.sum(logits >= np.asarray(both)[:, None], axis=1), [2, 2, 1])


def test_the_likeliest_is_kept_whatever_is_asked(least, rng):
    logits = rng.normal(size=(BATCH, VOCAB)).astype(np.float32)
    for rules in (asked(top_p=0), asked(min_p=2), asked(1e-30, min_p=0.5)):
        np.testing.assert_array_equal(least(logits, *rules), logits.max(axis=1))


def test_rows_of_settings_are_apart(least, rng):
    logits = rng.normal(size=(BATCH, VOCAB)).astype(np.float32)
    found = least(logits, *asked(top_k=[0, 5, 1], top_p=[1, 1, 0.5]))
    np.testing.assert_array_equal(np.sum(logits >= np.asarray(found)[:, None], axis=1), [VOCAB, 5, 1])


@given(st.floats(width=32, allow_nan=False, allow_subnormal=False))
@settings(max_examples=200)
def test_the_search_finds_any_float_by_bits_and_by_digits(value):
    assert all(np.asarray(found) == np.float32(value) for found in _found(np.float32(value)))


@jax.jit
def _found(value):
    return search(lambda tried: tried <= value, ()), search_digits(lambda tried: [one <= value for one in tried], ())


@pytest.mark.few(shape=[(11, 900)])
@pytest.mark.parametrize("shape", [(1, 130), (11, 900)])
def test_the_kernel_neither_races_nor_reads_what_it_was_not_given(shape, rng, monkeypatch, watched):
    monkeypatch.setattr(tpu, "CHUNK", 256)
    logits = rng.normal(size=shape).astype(np.float32)
    one: Any = np.ones(shape[0], np.float32)

    @jax.jit
    def rules_and_expected(logits):
        rules = Rules.of(logits, one, jnp.full(shape[0], 40), 0.7 * one, None)
        return rules, least_kept_xla(logits, rules)

    rules, expected = rules_and_expected(logits)
    np.testing.assert_array_equal(least_kept_tpu(logits, rules, interpret=watched), expected)
