"""Masks: what they say of ranges is true of every pair."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.kernels.attention import Causal, Everything, Prefix, SameDocument, Window

MASKS = [
    Everything(),
    Causal(),
    Window(3),
    SameDocument(),
    Causal() & Window(1),
    Causal() & Window(4),
    Window(4) & Causal() & SameDocument(),
    Everything() & Causal(),
    Prefix(3),
    Prefix(4) & Window(5),
]
RANGES = [(a, b) for a, b in itertools.product(range(9), range(10)) if a < b]
TOTAL = 6


def pairs(mask, documents=None):
    """`queries keys` booleans, for the documents of one row of queries and keys."""
    pair = None if documents is None else (documents[None, :, None], documents[None, None, :TOTAL])
    allowed = mask.allowed(jnp.arange(10)[:, None], jnp.arange(TOTAL)[None, :], pair)
    return np.ones((10, TOTAL), bool) if allowed is None else np.broadcast_to(allowed, (1, 10, TOTAL))[0]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_no_query_sees_a_key_outside_the_range_that_its_mask_gives(mask):
    allowed = pairs(mask)
    for first, last in RANGES:
        low, high = mask.keys(first, last, TOTAL)
        seen = np.flatnonzero(allowed[first:last].any(axis=0))
        assert all(low <= key < high for key in seen), (first, last)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_indices_that_see_all_hide_nothing(mask):
    allowed = pairs(mask)
    for (first, last), (start, stop) in itertools.product(RANGES, RANGES):
        if mask.sees_all(first, last, start, stop):
            assert allowed[first:last, start:stop].all(), (first, last, start, stop)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_what_a_mask_says_of_numbers_it_says_of_arrays_and_of_traced_ones(mask):
    ends = [mask.keys(first, last, TOTAL) for first, last in RANGES]
    first, last = (jnp.array(side) for side in zip(*RANGES, strict=True))
    for made in (jax.jit(lambda a, b: mask.keys(a, b, TOTAL))(first, last), mask.keys(*np.array(RANGES).T, TOTAL)):
        together = np.stack([np.broadcast_to(end, len(RANGES)) for end in made], axis=1)
        np.testing.assert_array_equal(together, ends)


def test_a_mask_asks_for_documents_if_one_of_its_rules_does():
    assert (Causal() & SameDocument() & Window(3)).by_document
    assert not (Causal() & Window(3)).by_document


def test_causal_blocks_before_the_diagonal_need_no_mask():
    assert Causal().sees_all(8, 16, 0, 9)
    assert not Causal().sees_all(8, 16, 0, 10)
    assert (Causal() & Window(16)).sees_all(8, 16, 0, 8)
    assert not (Causal() & Window(15)).sees_all(8, 16, 0, 8)


def test_joined_masks_allow_what_both_do(rng):
    one, other = (MASKS[i] for i in rng.integers(len(MASKS), size=2))
    documents = np.sort(rng.integers(0, 3, 10))
    np.testing.assert_array_equal(pairs(one & other, documents), pairs(one, documents) & pairs(other, documents))


def test_masks_are_values_that_say_what_they_are():
    assert Causal() & Window(4) == Causal() & Window(4)
    assert str(Causal() & SameDocument() & Window(4)) == "causal & same document & window 4"


def test_a_window_without_a_key_is_refused():
    with pytest.raises(UserError, match=r"Window.size is 0; must be at least 1"):
        Window(0)


def test_a_prefix_of_less_than_nothing_is_refused():
    with pytest.raises(UserError, match=r"Prefix.size is -1; must be at least 0"):
        Prefix(-1)
