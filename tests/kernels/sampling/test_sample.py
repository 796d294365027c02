"""Draws: their distribution, and that each request's is its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.kernels.sampling import sample
from axon.kernels.sampling.draw import gumbel

VOCAB = 50

draw = jax.jit(sample)


@partial(jax.jit, static_argnums=1)
def keys(seed, count):
    return jax.random.split(jax.random.key(seed), count)


def settings(rng, batch):
    return {
        "temperature": rng.choice([0, 0.5, 2.0], batch).astype(np.float32),
        "top_k": rng.choice([0, 5, 30], batch).astype(np.int32),
        "top_p": rng.choice([0.5, 0.9, 1], batch).astype(np.float32),
        "min_p": rng.choice([0, 0.05], batch).astype(np.float32),
    }


def same(value, count, dtype=np.float32):
    return np.full(count, value, dtype)


def test_draws_follow_the_tempered_softmax_of_what_is_kept(seed, rng):
    draws, logits = 20_000, rng.normal(size=12).astype(np.float32)
    rows = np.broadcast_to(logits, (draws, 12))
    ids = draw(rows, keys(seed, draws), same(1.5, draws), same(9, draws, np.int32))
    chances = np.where(logits >= np.sort(logits)[-9], np.exp(logits.astype(np.float64) / 1.5), 0)
    chances /= chances.sum()
    found = np.bincount(ids, minlength=12)
    assert np.all(found[chances == 0] == 0)
    expected = draws * chances[chances > 0]
    assert np.sum((found[chances > 0] - expected) ** 2 / expected) < 50  # 8 degrees of freedom: once in 2e7


def test_a_draw_depends_neither_on_the_neighbours_nor_on_the_row(seed, rng):
    logits, rules, own = rng.normal(size=(6, VOCAB)).astype(np.float32), settings(rng, 6), keys(seed, 6)
    together = np.asarray(draw(logits, own, **rules))
    order = rng.permutation(6)
    turned = draw(logits[order], own[order], **{name: value[order] for name, value in rules.items()})
    np.testing.assert_array_equal(turned, together[order])
    alone = [
        int(draw(logits[i : i + 1], own[i : i + 1], **{n: v[i : i + 1] for n, v in rules.items()})[0]) for i in range(6)
    ]
    assert alone == together.tolist()


def test_another_key_gives_another_draw(seed, rng):
    logits = np.zeros((64, 1000), np.float32)
    ids = np.asarray(draw(logits, keys(seed, 64), same(1, 64)))
    assert len(set(ids.tolist())) > 40


def test_temperature_0_takes_the_first_of_the_likeliest(seed, rng):
    logits = rng.integers(0, 4, (40, VOCAB)).astype(np.float32)
    ids = draw(logits, keys(seed, 40), same(0, 40), same(3, 40, np.int32), same(0.5, 40))
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))


def test_greedy_requests_stay_greedy_beside_others(seed, rng):
    logits = rng.normal(size=(40, VOCAB)).astype(np.float32)
    temperature = np.where(np.arange(40) % 2, 0, 100).astype(np.float32)
    ids = np.asarray(draw(logits, keys(seed, 40), temperature))
    assert np.array_equal(ids[1::2], logits[1::2].argmax(axis=1))
    assert not np.array_equal(ids[::2], logits[::2].argmax(axis=1))


def test_a_logit_of_minus_infinity_is_never_drawn(seed, rng):
    logits = rng.normal(size=(500, 8)).astype(np.float32)
    logits[:, [0, 3, 7]] = -np.inf
    for top_k, top_p in ((0, 1), (7, 1), (0, 0.9999)):
        rules = same(50, 500), same(top_k, 500, np.int32), same(top_p, 500)
        ids = np.asarray(draw(logits, keys(seed, 500), *rules))
        assert not set(ids.tolist()) & {0, 3, 7}


@pytest.mark.full
def test_bfloat16_logits_are_read_as_float32(seed, rng):
    logits = jnp.asarray(rng.normal(size=(20, VOCAB)), jnp.bfloat16)
    rules = settings(rng, 20)
    one, other = (draw(x, keys(seed, 20), **rules) for x in (logits, logits.astype(jnp.float32)))
    np.testing.assert_array_equal(one, other)


def test_noise_is_gumbels_for_any_bits():
    bits = np.array([0, 1, 2, 1000, 2**31, 2**32 - 2**16, 2**32 - 1], np.uint32)
    u = np.minimum((bits.astype(np.float64) + 0.5) / 2**32, 1 - 2.0**-24)
    np.testing.assert_allclose(jax.jit(gumbel)(bits), -np.log(-np.log1p(-u)), rtol=2e-6, atol=3e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros(5, np.float32)}, r"float32\[5\]; give floats, batch × vocab"),
        ({"logits": np.zeros((4, 5), np.int32)}, r"int32\[4, 5\]; give floats"),
        ({"keys": np.zeros((4, 2), np.uint32)}, r"keys are uint32\[4, 2\]; expected keys of jax\.random\.key"),
        ({"keys": jax.random.split(jax.random.key(0), 3)}, r"keys has shape \[3\], and there are 4 requests"),
        ({"temperature": np.float32(1)}, r"temperature has shape \[\], and there are 4 requests"),
        ({"top_p": np.ones(5, np.float32)}, r"top_p has shape \[5\], and there are 4 requests"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_shape(change, message):
    good = {"logits": np.zeros((4, 5), np.float32), "keys": keys(0, 4), "temperature": np.ones(4, np.float32)}
    with pytest.raises(UserError, match=message):
        sample(**{**good, **change})
