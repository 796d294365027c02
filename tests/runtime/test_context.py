"""A method for each kind of block: what the layout names, what is chosen, and what is refused."""

import pytest

from axon.kernels.attention import Causal
from axon.layout import Layout, LayoutError, Placement
from axon.nn import Attention
from axon.runtime.context import with_context
from models.deepseek import DeepSeek
from models.gemma import Gemma

GEMMA = Gemma(vocab=61, embed=24, layers=3, heads=4, kv_heads=4, mlp=64, head_dim=6, window=5)
LATENTS = DeepSeek(
    vocab=61,
    embed=24,
    layers=1,
    first_dense=1,
    heads=8,
    mlp=64,
    kv_latent=12,
    nope_dim=6,
    rope_dim=4,
    value_dim=8,
    multi_token=True,
)


def chosen(model, layout, seq=64):
    placement, line = with_context(Placement.described(layout, 8), model.build(), seq)
    return placement.layout.context, line


def test_kinds_of_block_that_are_left_out_are_chosen_for_and_all_are_printed():
    context, line = chosen(GEMMA, Layout({"context": 4}, context={"full": "ulysses", "last": "gather"}))
    assert context == {"full": "ulysses", "last": "gather", "local": "ring"}
    assert line == (
        "full: ulysses; last: gather; local: ring, a forward sends 33% of all keys and values, overlapped; "
        "an all-to-all 50%"
    )


def test_the_block_that_predicts_one_token_further_is_a_kind():
    context, _ = chosen(LATENTS, Layout({"context": 4}, context={"dense": "gather", "multi_token": "ring"}))
    assert context == {"dense": "gather", "multi_token": "ring"}


def test_latent_attention_has_as_many_keys_as_heads_and_an_exchange_sends_its_latents():
    context, line = chosen(LATENTS, Layout({"context": 4}))
    share = (8 * (10 + 8) / 4 + (12 + 4)) / (8 * (10 + 8))
    assert (context, line) == (
        "ulysses",
        f"ulysses: a forward sends {share:.0%} of all keys and values; a ring 100%, which it would overlap",
    )


def test_an_unknown_kind_of_block_is_refused_with_the_nearest_name():
    with pytest.raises(LayoutError, match=r"in a kind of block named 'locl'\. Did you mean 'local'\?"):
        chosen(GEMMA, Layout({"context": 4}, context={"locl": "ring"}), seq=None)


def test_methods_by_kind_are_refused_for_attention_that_is_in_no_block():
    module = GEMMA.build()
    module.first = Attention(GEMMA.dims, Causal())
    placement = Placement.described(Layout({"context": 4}, context={"full": "ring"}), 4)
    with pytest.raises(LayoutError, match="this model has attention outside of its blocks"):
        with_context(placement, module, 64)
