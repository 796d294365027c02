"""The same tree for people who own their loop."""

from dataclasses import replace

import numpy as np
import pytest

from axon.data import TokenizerFile
from axon.errors import UserError
from axon.observe.metrics import read_metrics
from axon.run import Evaluation, Train, program


def test_a_loop_of_ones_own_gives_the_same_losses_as_run(trained, few):
    train = trained.train
    expected = [record["loss"] for record in read_metrics(trained.folder / "metrics.jsonl") if "loss" in record]
    losses = []
    with few(1), train.data.prepare(str).train(train.seed) as batches:
        made = program(train)
        state = made.init()
        for _ in range(3):
            state, metrics = made.step(state, made.place(next(batches)))
            losses.append(float(metrics["loss"]))
        nats, tokens = made.evaluate(state, made.place(next(batches)))["loss"]
    np.testing.assert_allclose(losses, expected[:3], rtol=1e-6)
    assert float(nats) / float(tokens) < losses[0]


def test_a_split_that_will_be_asked_for_must_have_a_share_of_the_text(tiny):
    with pytest.raises(UserError, match=r"needs Data\.held_out above 0: set it, or Train.evaluation"):
        replace(tiny, data=replace(tiny.data, held_out=0.0))
    replace(tiny, data=replace(tiny.data, held_out=0.0), evaluation=None)
    with pytest.raises(UserError, match="leaves no text to train on"):
        replace(tiny, data=replace(tiny.data, held_out=1.0, tokenizer=TokenizerFile("any.json")))


def test_sizes_below_one_are_refused(tiny):
    with pytest.raises(UserError, match=r"Train\.steps is 0; must be at least 1"):
        Train(tiny.model, tiny.data, tiny.optimizer, steps=0)
    for field in ("every", "batches"):
        with pytest.raises(UserError, match=rf"Evaluation\.{field} is 0; must be at least 1"):
            Evaluation(**{field: 0})


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**64])
def test_a_seed_that_would_give_the_values_of_another_is_refused(tiny, wrong):
    with pytest.raises(UserError, match=rf"Train\.seed is {wrong}; must be"):
        replace(tiny, seed=wrong)
