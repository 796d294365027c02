"""States of many sequences go on by their own tokens alone, however these are divided into passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.axes import ArraySpec
from axon.errors import UserError
from axon.nn import CacheSpec, Inputs, SequenceRows
from axon.nn.kv_cache import Ragged

WIDTH, TAPS = 3, 4


def decayed(state, token):
    """S = 0.9·S + x, seen after."""
    state = 0.9 * state + token
    return state, (2 * state, jnp.sum(state, axis=-1))


def reference_scan(x):
    """`decayed` over one sequence's tokens `seq width`: the outputs, and the state."""
    state, outs = np.zeros(WIDTH, np.float32), []
    for token in x:
        state = np.float32(0.9) * state + token
        outs.append(2 * state)
    return np.array(outs).reshape(-1, WIDTH), state


def passes_of(rng, sequences):
    """Each sequence's tokens, divided at random into passes, some without any: of each pass how many each has."""
    lengths = rng.integers(1, 12, sequences)
    cuts = [np.sort(rng.integers(0, length + 1, 2)) for length in lengths]
    return np.array([np.diff([0, *cut, length]) for cut, length in zip(cuts, lengths, strict=True)]).T


def run(rng, counts_of_passes, states, call):
    """`call(rows, x, states)` → (states, out) of each pass, tokens in one row padded at its end: by sequence its tokens
    and the outputs; and the states. What is before the first token is noise."""
    done = np.zeros(counts_of_passes.shape[1], int)
    tokens, outs = ([[] for _ in done] for _ in range(2))
    for counts in counts_of_passes:
        x = rng.normal(size=(1, int(counts.sum()) + 5, WIDTH)).astype(np.float32)
        starts = np.cumsum([0, *counts[:-1]])
        rows = SequenceRows(jnp.asarray(starts), jnp.asarray(counts), jnp.asarray((done == 0) & (counts > 0)))
        states, out = jax.jit(call)(rows, x, states)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
            tokens[i] += [*x[0, start : start + count]]
            outs[i] += [*np.asarray(out)[0, start : start + count]]
        done += counts
    return tokens, outs, np.asarray(states)


def test_a_recurrence_of_many_sequences_in_passes_is_that_of_each_alone(rng):
    noise = rng.normal(size=(5, WIDTH)).astype(np.float32)

    def call(rows, x, states):
        states, (out, total) = rows.scan(decayed, states, x)
        assert total.shape == x.shape[:2]
        return states, out

    tokens, outs, states = run(rng, passes_of(rng, 5), noise, call)
    for own, out, state in zip(tokens, outs, states, strict=True):
        expected, last = reference_scan(own)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-6)


def test_a_window_reaches_into_the_passes_before_and_not_beyond_the_first_token(rng):
    noise = rng.normal(size=(5, TAPS - 1, WIDTH)).astype(np.float32)

    def call(rows, x, last):
        windows, last = rows.windows(x, last)
        return last, windows

    tokens, outs, states = run(rng, passes_of(rng, 5), noise, call)
    for own, out, last in zip(tokens, outs, states, strict=True):
        padded = np.concatenate([np.zeros((TAPS - 1, WIDTH), np.float32), np.array(own)])
        np.testing.assert_array_equal(out, [padded[i : i + TAPS] for i in range(len(own))])
        np.testing.assert_array_equal(last, padded[-(TAPS - 1) :])


@pytest.mark.full
@pytest.mark.draws(1)
def test_of_drafts_only_those_that_are_accepted_are_in_the_state_of_the_next_pass(rng):
    most, scanned, start = 3, [], 0
    state, last = jnp.zeros((2 * (1 + most), WIDTH)), jnp.zeros((2 * (1 + most), TAPS - 1, WIDTH))
    version = np.zeros(2, int)
    for drafts in ((0, 0), (3, 1), (0, 2), (2, 3), (0, 0)):
        counts = 1 + np.array(drafts)
        x = jnp.asarray(rng.normal(size=(1, int(counts.sum()) + 2, WIDTH)), jnp.float32)
        starts, begins = jnp.array([0, counts[0]]), jnp.full(2, start == 0)
        rows = SequenceRows(starts, jnp.asarray(counts), begins, jnp.array(drafts), jnp.asarray(version))
        state, (out, _) = jax.jit(lambda rows, x, state: rows.scan(decayed, state, x))(rows, x, state)
        windows, last = jax.jit(lambda rows, x, last: rows.windows(x, last))(rows, x, last)
        version = np.array([rng.integers(0, count + 1) for count in drafts])
        own = slice(0, int(counts[0]))  # of the first sequence
        kept = [*scanned, *np.asarray(x[0, own])]
        np.testing.assert_allclose(out[0, own], reference_scan(kept)[0][len(scanned) :], rtol=1e-5, atol=1e-6)
        padded = np.concatenate([np.zeros((TAPS - 1, WIDTH)), np.array(kept)])
        expected = [padded[i : i + TAPS] for i in range(len(scanned), len(kept))]
        np.testing.assert_allclose(windows[0, own], expected)
        scanned, start = kept[: len(scanned) + 1 + int(version[0])], start + 1


def test_rows_may_be_a_sequence_each(rng):
    tokens = jnp.zeros((2, 6), jnp.int32)
    rows = Inputs(tokens, tokens, start=jnp.int32(0)).rows
    x = jnp.asarray(rng.normal(size=(2, 6, WIDTH)), jnp.float32)
    states, (out, _) = rows.scan(decayed, jnp.ones((2, WIDTH)), x)
    for row in range(2):
        expected, last = reference_scan(x[row])
        np.testing.assert_allclose(out[row], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(states[row], last, rtol=1e-5, atol=1e-6)


def test_each_new_token_meets_what_its_own_sequence_has(rng):
    counts, constant = np.array([2, 0, 3]), jnp.asarray(rng.normal(size=(3, WIDTH)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(1, 7, WIDTH)), jnp.float32)
    rows = SequenceRows(jnp.array([0, 2, 2]), jnp.asarray(counts), jnp.zeros(3, bool))
    state, out = rows.scan(lambda state, token: (state, token * constant), (), x)
    assert state == ()
    np.testing.assert_array_equal(out[0, :5], x[0, :5] * jnp.repeat(constant, counts, axis=0))
    assert not np.any(out[0, 5:])


def test_a_sequence_of_a_step_begins_where_it_has_no_tokens_before(rng):
    lens, bounds = jnp.array([4, 3, 0, 9]), jnp.array([0, 4, 5, 5, 7])
    rows = Inputs(jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 8), jnp.int32), start=Ragged(lens, bounds, (), ())).rows
    assert rows.begins.tolist() == [True, False, False, False]
    assert rows.counts.tolist() == [4, 1, 0, 2]


def test_a_cache_says_of_which_kind_it_is():
    paged = CacheSpec(("batch", "pages", "page_size"), (1, 2, 4), cache_kind="pages")
    assert isinstance(paged, ArraySpec)
    for axes, kind in ((("batch", "kv_seq"), "pages"), (("pages", "batch"), "state"), (("mlp",), "state")):
        with pytest.raises(UserError, match=kind):
            CacheSpec(axes, (1,) * len(axes), cache_kind=kind)
    with pytest.raises(UserError, match="cache_kind"):
        CacheSpec(("batch",), (1,), cache_kind="window")  # pyright: ignore[reportArgumentType]
