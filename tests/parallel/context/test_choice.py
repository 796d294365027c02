"""Which way attention sees whole sequences where a layout leaves it open, and that it is printed."""

import jax
import pytest

from axon.kernels.attention import Causal, Prefix, SameDocument, Window
from axon.layout import Layout, LayoutError
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


@pytest.mark.parametrize(
    ("layout", "seq", "expected"),
    [
        (
            {"mesh": {"context": 2}, "context": "ulysses"},
            32,
            "3 heads are not divisible by 2, and Layout.context = 'ul",
        ),
        ({"mesh": {"context": 4}, "context": "ring"}, 36, "stores a sequence in 8 chunks, and 36 positions do not"),
        ({"mesh": {"context": 4}, "context": {"block": "ring"}}, 36, "in 8 chunks, and 36 positions do not divide"),
        ({"mesh": {"context": 2}, "context": {"blok": "ring"}}, 32, "a kind of block named 'blok'. Did you mean 'bl"),
        ({"mesh": {"context": 2}, "rows": {"heads.attention": "context"}}, 32, "split twice over mesh axis 'context'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_message_when_the_program_is_made(layout, seq, expected):
    model = Llama(vocab=61, embed=24, layers=1, heads=3, kv_heads=3, mlp=64)
    devices = jax.devices()[: layout["mesh"]["context"]]
    with pytest.raises(LayoutError) as caught:
        Program(model, Layout(**layout), AdamW(Constant(1e-3)), batch=2, seq=seq, devices=devices)
    (message,) = str(caught.value).splitlines()
    assert expected in message
