"""The loss on held-out data: of text and of images, of every objective in its own unit."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from axon.errors import UserError
from axon.run.held_out import HeldOutLoss, held_out_loss
from axon.train.classification import Classification
from axon.train.contrastive import InfoNCE
from axon.train.evaluate import Evaluator
from axon.train.masked import MaskedToken
from axon.train.objective import MultiToken, NextToken
from axon.train.preference import DPO
from axon.train.spans import SpanCorruption

SEQUENCES = slice(0, 3)


class FakeEvaluator:
    """Metrics that are the batch itself."""

    host_sequences = SEQUENCES

    def __init__(self, objective):
        self.unit = Evaluator(None, objective, 1, 1).unit

    def __call__(self, parameters, batch, variables):
        return batch["metrics"]

    def place(self, batch):
        return batch


def data(batches, of_text):
    """Prepared data of these batches, of text or of images."""

    def held_out(count, sequences):
        assert sequences == SEQUENCES
        return nullcontext(batches[:count])

    return SimpleNamespace(held_out=held_out, text_bytes=lambda batch: batch["bytes"] if of_text else None)


def drawn(rng, *metrics):
    """A batch of (sum, count) pairs under these names."""
    found = {name: (np.float32(rng.uniform(1, 9)), np.float32(rng.integers(1, 9))) for name in metrics}
    return {"metrics": found, "bytes": rng.integers(1, 9, (2, 3), dtype=np.int32)}


def mean(batches, name):
    sums, counts = zip(*(batch["metrics"][name] for batch in batches), strict=True)
    return float(sum(sums) / sum(counts))


@pytest.mark.parametrize(
    ("objective", "unit"),
    [
        (NextToken(), "token"),
        (MultiToken(), "token"),
        (MaskedToken(), "predicted token"),
        (SpanCorruption(), "predicted token"),
        (Classification(), "image"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_loss_is_said_in_the_unit_of_its_objective(objective, unit, rng):
    found = held_out_loss(FakeEvaluator(objective), data([drawn(rng, "loss")], False), {}, {}, None)
    over = f"{found.count} {unit}" + "s" * (found.count != 1)
    assert str(found) == f"loss {found.loss:.4f} nats per {unit}, over {over}"
    assert found.metrics() == {"loss": found.loss}


def test_text_has_bits_per_byte_where_every_token_is_predicted(rng):
    batches = [drawn(rng, "loss", "another") for _ in range(3)]
    found = held_out_loss(FakeEvaluator(NextToken()), data(batches, True), {}, {}, 2)
    nats = sum(batch["metrics"]["loss"][0] for batch in batches[:2])
    bits = nats / math.log(2) / sum(batch["bytes"].sum() for batch in batches[:2])
    count = int(sum(batch["metrics"]["loss"][1] for batch in batches[:2]))
    others = {"another": pytest.approx(mean(batches[:2], "another"))}
    assert found == HeldOutLoss(pytest.approx(mean(batches[:2], "loss")), "token", count, pytest.approx(bits), others)
    said = f"{found.bits_per_byte:.4f} bits per byte, another {found.others['another']:.4f}"
    assert f" nats per token, {said}, over {count} tokens" in str(found)
    assert held_out_loss(FakeEvaluator(MaskedToken()), data(batches, True), {}, {}, 2).bits_per_byte is None


@pytest.mark.parametrize("objective", [Classification(), DPO(), InfoNCE()], ids=lambda one: type(one).__name__)
def test_every_metric_of_the_objective_is_carried_as_its_mean_and_said(objective, rng):
    names = ["accuracy", *{DPO: ("margin", "chosen"), InfoNCE: ("positive",)}.get(type(objective), ())]
    batches = [drawn(rng, "loss", *names) for _ in range(3)]
    found = held_out_loss(FakeEvaluator(objective), data(batches, False), {}, {}, None)
    assert found.metrics() == {name: pytest.approx(mean(batches, name)) for name in ("loss", *names)}
    for name in names:
        assert f", {name} {found.others[name]:.4f}" in str(found)
    assert f"nats per {found.unit}, accuracy {found.others['accuracy']:.4f}" in str(found)


def test_a_metric_of_which_the_data_have_none_is_left_out(rng):
    batch = drawn(rng, "loss", "accuracy")
    batch["metrics"]["accuracy"] = (np.float32(0), np.float32(0))
    found = held_out_loss(FakeEvaluator(Classification()), data([batch], False), {}, {}, None)
    assert found.metrics().keys() == {"loss"}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_says_what_to_do(value, rng):
    batch = drawn(rng, "loss")
    batch["metrics"]["loss"] = (np.float32(value), np.float32(1))
    with pytest.raises(UserError, match=f"the loss on held-out data is {value}: .* Evaluate an earlier checkpoint"):
        held_out_loss(FakeEvaluator(NextToken()), data([batch], True), {}, {}, None)


def test_held_out_data_without_anything_to_predict_are_refused(rng):
    batch = drawn(rng, "loss")
    batch["metrics"]["loss"] = (np.float32(0), np.float32(0))
    with pytest.raises(UserError, match="the mean over no predicted token"):
        held_out_loss(FakeEvaluator(MaskedToken()), data([batch], True), {}, {}, None)
