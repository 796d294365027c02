"""Which way attention sees whole sequences where a layout leaves it open, and that it is printed."""

import jax
import pytest

from axon.kernels.attention import Causal, Prefix, SameDocument, Window
from axon.layout import Layout
from axon.parallel.context import AttentionKind, Split, choose_context
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.llama import Llama

FULL, PREFIX = Causal() & SameDocument(), Prefix(64)


def kind(heads=32, kv_heads=8, mask=FULL):
    return AttentionKind(heads, kv_heads, mask)


@pytest.mark.parametrize(
    ("kinds", "split", "expected"),
    [
        ([kind()], Split(8192, ring=4, ulysses=1, heads=1), "ring"),
        ([kind()], Split(8192, ring=16, ulysses=1, heads=1), "ulysses"),
        ([kind()], Split(8192, ring=16, ulysses=1, heads=8), "ring"),  # 32 heads do not divide by 128
        ([kind(), kind(mask=FULL & Window(512))], Split(8192, ring=4, ulysses=1, heads=1), "ring"),
        ([kind(mask=PREFIX)], Split(8192, ring=4, ulysses=1, heads=1), "ulysses"),
        ([kind(heads=6, kv_heads=6, mask=PREFIX)], Split(8192, ring=4, ulysses=1, heads=1), "gather"),
        ([kind()], Split(8196, ring=4, ulysses=1, heads=1), "ulysses"),
        ([kind()], Split(8192, ring=4, ulysses=2, heads=2), "usp"),
        ([kind(heads=6, kv_heads=2)], Split(8192, ring=2, ulysses=4, heads=2), "ring"),
    ],
)
def test_a_ring_is_chosen_unless_an_exchange_sends_less_than_half_or_there_is_none(kinds, split, expected):
    assert choose_context(kinds, split)[0] == expected


def test_the_choice_is_made_before_batches_are_placed_and_is_printed():
    model = Llama(vocab=61, embed=24, layers=1, heads=3, kv_heads=3, mlp=64)
    shape = {"batch": 2, "seq": 16, "devices": jax.devices()[:2]}
    made = Program(model, Layout({"context": 2}), AdamW(Constant(1e-3)), **shape)
    assert made.choices["context parallelism"] == (
        "ring: a forward sends 100% of all keys and values, overlapped; no all-to-all: 3 heads do not divide by 2"
    )
    assert made.placement.stored_positions(16).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, *range(4, 12)]
