"""Masked tokens: how many, what stands in their place, and on what the draw depends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon.errors import UserError
from axon.layout import Layout
from axon.train.masked import MaskedToken
from axon.train.objective import SEQUENCES
from axon.train.optimizers import AdamW, Constant
from axon.train.step import Program
from models.bert import Bert
from models.llama import Llama

VOCAB = 1000
MODULE = Bert(vocab=VOCAB, embed=8, layers=1, heads=2, mlp=8, positions=512).build()


def drawn(objective, batch, step=0):
    numbers = jnp.arange(len(batch["tokens"]), dtype=jnp.int32)
    draw = jax.jit(lambda batch, key: objective.draw(MODULE, batch, key))
    found = draw({**batch, SEQUENCES: numbers}, jax.random.key(step))
    return {name: np.asarray(value) for name, value in found.items()}


def test_a_share_of_the_real_tokens_of_each_sequence_is_masked_replaced_or_left_and_predicted(rng, packed_batch):
    batch = packed_batch(rng, 64, 400, VOCAB - 1)
    found, counts = drawn(MaskedToken(), batch), np.round(0.15 * batch["weights"].sum(1))
    np.testing.assert_array_equal(found["counted"].sum(1), counts)
    changes, total = {"masked": 0, "kept": 0, "other": 0}, int(counts.sum())
    for sequence, (places, counted) in enumerate(zip(found["places"], found["counted"] > 0, strict=True)):
        chosen = places[counted]
        assert len(set(chosen)) == len(chosen)
        assert batch["weights"][sequence, chosen].all()
        before, after = batch["tokens"][sequence], found["tokens"][sequence]
        np.testing.assert_array_equal(np.delete(after, chosen), np.delete(before, chosen))
        np.testing.assert_array_equal(found["targets"][sequence][counted], before[chosen])
        changes["masked"] += np.sum(after[chosen] == VOCAB - 1)
        changes["kept"] += np.sum(after[chosen] == before[chosen])
    shares = {name: count / total for name, count in changes.items()}
    assert shares["masked"] == pytest.approx(0.8, abs=0.05)
    assert shares["kept"] == pytest.approx(0.1, abs=0.04)


def test_the_draw_is_another_in_another_step_and_the_same_in_the_same(rng, packed_batch):
    batch = packed_batch(rng, 4, 64, VOCAB)
    one, same, other = (drawn(MaskedToken(), batch, step)["tokens"] for step in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any(axis=1).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: MaskedToken(rate=0.0), "MaskedToken.rate is 0.0; must be in (0, 1)"),
        (lambda: MaskedToken(replaced=0.3), "MaskedToken: masked 0.8 and replaced 0.3 add up to more than 1"),
        (
            lambda: MaskedToken().check(Llama(8, 8, 1, 2, 2, 8).build()),
            "MaskedToken needs a model with masked_logits, as models.bert.Bert with head = True; build() returns a "
            "LanguageModel",
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(UserError) as caught:
        wrong()
    assert message in str(caught.value)


@pytest.mark.full
@pytest.mark.draws(1)
def test_a_pooler_that_masked_tokens_do_not_reach_stays_as_it_was(rng, packed_batch, few):
    model, optimizer = Bert(64, 8, 1, 2, 8, positions=16, pooler=True), AdamW(Constant(1e-2), weight_decay=0.1)
    with few(1):
        program = Program(model, Layout(), optimizer, batch=4, seq=16, objective=MaskedToken())
    state = program.init()
    before = jax.device_get(state.parameters)
    after = jax.device_get(program.step(state, program.place(packed_batch(rng, 4, 16, 63)))[0].parameters)
    jax.tree.map(np.testing.assert_array_equal, after["pooler"], before["pooler"])
    assert not np.array_equal(after["transform"], before["transform"])
