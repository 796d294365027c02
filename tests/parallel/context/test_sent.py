"""What attention over split positions sends and stores, from the compiled program, against formulas."""

import math
import re
from collections import Counter

import pytest

from axon.kernels.attention import Causal, SameDocument, Window
from axon.nn import Attention, LatentAttention, Rope
from axon.plan.compiled import collectives

DIMS = {"embed": 16, "heads": 8, "kv_heads": 2, "head_dim": 4}
FULL = Causal() & SameDocument()
BATCH = 2


@pytest.fixture
def program(lowered):
    """The text of attention's program, forward or forward and backward."""
    return lambda placement, mask, seq, gradients: (
        lowered(placement, Attention(DIMS, mask), BATCH, seq, gradients=gradients).compile().as_text()
    )


def sent(text, dtype="f32"):
    """Kind of collective → elements of `dtype` that a device sends in attention, but for weights' gradients."""
    total = Counter()
    for one in collectives(text):
        if one.kind != "all-reduce" and one.arrays[0][0] == dtype:
            total[one.kind] += round(one.times * one.sent / 4)
    return total


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "both"])
def test_a_ring_sends_the_keys_and_values_of_all_other_devices_and_their_gradients(size, gradients, placed, program):
    """(n − 1)/n of all keys and values in a forward; in a backward those again, and their gradients; and documents."""
    seq = 16 * size
    text = program(placed({"context": size}, context="ring"), FULL, seq, gradients)
    keys = 2 * BATCH * (seq // size) * DIMS["kv_heads"] * DIMS["head_dim"]
    found, documents, others = sent(text), sent(text, "s32"), size - 1
    assert {*found, *documents} == {"collective-permute"}
    if not gradients:
        assert found["collective-permute"] == others * keys
        assert documents["collective-permute"] == others * BATCH * (seq // size)
    else:  # less where the compiler keeps what the forward was sent
        assert 2 * others * keys <= found["collective-permute"] <= 3 * others * keys


@pytest.mark.few(gradients=(True,))
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "both"])
def test_a_window_sends_the_chunks_that_it_reaches(gradients, placed, program):
    size, seq = 4, 64
    text = program(placed({"context": size}, context="ring"), FULL & Window(7), seq, gradients)
    keys = 2 * BATCH * (seq // size) * DIMS["kv_heads"] * DIMS["head_dim"]
    assert sent(text) == {"collective-permute": keys * (2 if gradients else 1)}  # what the forward was sent is kept


@pytest.mark.few(gradients=(True,), layout=({"mesh": {"context": 4}},))
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize(
    "layout", [{"mesh": {"context": 4}}, {"mesh": {"context": 8}}, {"mesh": {"context": 2, "tensor": 2}}], ids=str
)
def test_an_exchange_is_all_to_alls_of_a_devices_own_positions(layout, gradients, placed, program):
    """(n − 1)/n of a device's queries, outputs, keys and values, each head of these as often as a device needs one."""
    size, tensor, seq = layout["mesh"]["context"], layout["mesh"].get("tensor", 1), 64
    text = program(placed(**layout, context="ulysses"), FULL, seq, gradients)
    heads = 2 * DIMS["heads"] + 2 * max(DIMS["kv_heads"], size * tensor)
    own = BATCH * (seq // size) * heads * DIMS["head_dim"] // tensor
    assert sent(text)["all-to-all"] == own * (size - 1) // size * (2 if gradients else 1)
    weights = {(16, 8, 4), (16, 2, 4), (8, 4, 16)}
    gathers = [one for one in collectives(text) if one.kind == "all-gather" and one.arrays[0][0] == "f32"]
    assert all(shape in weights for one in gathers for _, shape in one.arrays)


@pytest.mark.full
def test_an_exchange_gathers_latents_and_not_the_keys_and_values_of_all_heads(lowered, placed):
    size, seq, heads, nope, rope, value, latent = 4, 64, 8, 12, 4, 8, 20
    dims = {"embed": 16, "heads": heads, "nope_dim": nope, "rope_dim": rope, "value_dim": value, "kv_latent": latent}
    attention = LatentAttention(dims, FULL, rope=Rope())
    placement = placed({"context": size}, context="ulysses")
    text = lowered(placement, attention, BATCH, seq, gradients=False).compile().as_text()
    own = BATCH * (seq // size)
    assert sent(text)["all-to-all"] == own * heads * (nope + rope + value) * (size - 1) // size
    gathered = {shape for one in collectives(text) if one.kind == "all-gather" for _, shape in one.arrays}
    assert {(BATCH, seq, latent), (BATCH, seq, rope)} <= gathered
    assert not [shape for shape in gathered if seq in shape and math.prod(shape) > BATCH * seq * latent]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("context", ["ring", "ulysses", "usp", "gather"])
def test_no_array_has_all_pairs_of_positions(context, placed, program):
    seq, mesh = 4096, {"context": 4, "ulysses": 2} if context == "usp" else {"context": 8}
    text = program(placed(mesh, context=context), FULL, seq, gradients=True)
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"\w\d+\[([\d,]+)\]", text)}
    assert not [shape for shape in shapes if sum(dimension >= seq // 8 for dimension in shape) > 1]
