"""A `Layout.context` for each kind of block: loss and gradients are one device's."""

import pytest
from parity import Problem, check, on_one_device

from axon.layout import Layout
from axon.nn import Rope
from models.gemma import Gemma

MODEL = Gemma(
    vocab=61,
    vocab_multiple=64,
    embed=32,
    heads=8,
    kv_heads=2,
    mlp=64,
    head_dim=4,
    layers=4,
    window=9,
    local_rope=Rope(100.0),
    soft_cap=2.0,
)
BOTH = {"context": 2, "ulysses": 2}
LAYOUTS = [
    Layout({"pipe": 2, "context": 4}, context={"local": "ring", "full": "ulysses"}, microbatches=2),
]
MORE = [
    Layout(BOTH, context={"local": "ring", "full": "usp"}),  # a ring of four, and one of two
    Layout({"context": 4}, context={"local": "ring", "full": "ulysses"}),  # whole sequences, stored zig-zag
    Layout({"context": 4}, context={"local": "gather", "full": "ring"}),
    Layout(BOTH, context={"local": "gather", "full": "usp"}),  # gathered over more devices than the ring has
    Layout({"context": 4, "tensor": 2}, context={"local": "gather", "full": "ulysses"}),
    Layout({"context": 4}, context={"full": "ulysses"}),  # of the others the rule's
    Layout({"data": 2, "context": 4}, context={"local": "ring", "full": "ulysses"}, zero=3, auto=True),
]


def described(layout):
    mesh = " × ".join(f"{axis} {size}" for axis, size in layout.mesh.items())
    return (
        f"{mesh}: {', '.join(f'{kind} {method}' for kind, method in layout.context.items())}" + ", auto" * layout.auto
    )


@pytest.fixture(scope="module")
def expected(packed_batch):
    """What one device makes of a step, once for all layouts."""
    return on_one_device(Problem(MODEL, sequences=8, steps=1), packed_batch)


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(one, marks=pytest.mark.full) for one in LAYOUTS),
        *(pytest.param(one, marks=pytest.mark.slow) for one in MORE),
    ],
    ids=described,
)
def test_each_kind_of_block_sees_whole_sequences_in_its_own_way(layout, expected):
    check(layout, expected)
