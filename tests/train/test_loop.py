"""The loop, around a step that only pretends."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from axon.data import Feed
from axon.train.loop import Diverged, Loop

PATHS = ("first", "second/deep", "third")


class Counting(Feed):
    """A feed of numbers; notes of which step's state each is drawn, where it sees one."""

    def __init__(self, first, sees_state, events):
        self.number, self.sees_state, self.events = first - 1, sees_state, events

    def draw(self, state):
        self.number += 1
        if self.sees_state:
            self.events.append(f"draw of {state}")
        return self.number

    @property
    def metrics(self):
        return {"drawn": float(self.number)} if self.sees_state else {}


class Pretended:
    """A program and its step: loss 1/step, gradients as said; notes what happens in which order."""

    def __init__(self, platform="cpu", bad=None, stop_after=None):
        self.placement = SimpleNamespace(platform=platform)
        self.parameters = dict.fromkeys(PATHS)
        self.bad, self.stop_after, self.events = bad or {}, stop_after, []
        self.optimizer = SimpleNamespace()

    def execute(self, state, batch):
        step = state + 1
        self.events.append(f"run {step}")
        norms = np.array(self.bad.get(step, [1.0, 4.0, 4.0]))
        loss = np.float32(1 / step)
        metrics = {"loss": loss, "grad_norm": np.sqrt(norms.sum()), "learning_rate": 0.1, "tokens": 10, "norms": norms}
        assert batch == step - 1, "each step has the batch of its own number"
        return step, {name: jnp.asarray(value) for name, value in metrics.items()}

    def place(self, batch):
        return batch

    def loop(self, tokens=0, first=0, sees_state=False):
        feed = Counting(first, sees_state, self.events)
        self.records, self.late = [], []

        def log(record):
            self.events.append(f"read {record['step']}")
            self.records.append(record)

        def stop(behind):
            self.late.append(behind)
            return self.stop_after is not None and f"run {self.stop_after}" in self.events

        return Loop(self, self.execute, feed, log, lambda step: f"place {step}", stop, tokens)  # pyright: ignore


def test_every_step_gets_its_batch_and_its_record():
    pretended = Pretended()
    loop = pretended.loop(tokens=100, first=3)
    assert loop.advance(3, 3, 5) == (5, 5)  # pyright: ignore
    assert loop.advance(5, 5, 8) == (8, 8)  # pyright: ignore
    assert [record["step"] for record in pretended.records] == [4, 5, 6, 7, 8]
    assert [record["tokens"] for record in pretended.records] == [110, 120, 130, 140, 150]
    assert loop.tokens == 150
    record = pretended.records[0]
    assert record["loss"] == pytest.approx(1 / 4)
    assert record["grad_norm"] == 3.0
    assert record["tokens_per_second"] == pytest.approx(10 / record["step_seconds"])


@pytest.mark.parametrize(
    ("platform", "events"),
    [
        ("cpu", ["run 1", "read 1", "run 2", "read 2", "run 3", "read 3"]),
        ("tpu", ["run 1", "run 2", "read 1", "run 3", "read 2", "read 3"]),
    ],
)
def test_metrics_are_read_while_the_next_step_runs_except_on_cpu(platform, events):
    pretended = Pretended(platform)
    pretended.loop().advance(0, 0, 3)  # pyright: ignore
    assert pretended.events == events
    assert pretended.late == [0 if platform == "cpu" else 1] * 3  # of the answer to whether to stop


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_batch_of_a_feed_that_sees_the_state_is_drawn_of_the_state_it_is_trained_on_and_none_in_vain(platform):
    pretended = Pretended(platform, stop_after=3)
    loop = pretended.loop(sees_state=True)
    assert loop.advance(0, 0, 2) == (2, 2)  # pyright: ignore
    assert loop.advance(2, 2, 9) == (3, 3)  # pyright: ignore
    steps = [(f"draw of {step - 1}", f"run {step}", f"read {step}") for step in (1, 2, 3)]
    assert pretended.events == [event for step in steps for event in step]
    assert [record["drawn"] for record in pretended.records] == [0, 1, 2]
    assert pretended.late == [0, 0, 0]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_asked_to_stop_it_ends_after_the_step_with_all_records_read(platform):
    pretended = Pretended(platform, stop_after=2)
    assert pretended.loop().advance(0, 0, 9) == (2, 2)  # pyright: ignore
    assert [record["step"] for record in pretended.records] == [1, 2]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_names_step_batch_and_parameter(platform, value):
    pretended = Pretended(platform, bad={3: [1.0, value, value]})
    with pytest.raises(Diverged) as stopped:
        pretended.loop().advance(0, 0, 3)  # pyright: ignore
    message = str(stopped.value)
    assert message.startswith("step 3: loss 0.333")
    assert "that of second/deep (2 of 3 parameters)" in message
    assert "place 2" in message
    assert [record["step"] for record in pretended.records] == [1, 2]


def test_a_loss_that_is_not_finite_stops_though_every_gradient_is():
    pretended = Pretended()

    def execute(state, batch):
        step, metrics = pretended.execute(state, batch)
        return step, metrics | {"loss": np.float32(np.nan)}

    loop = pretended.loop()
    loop.execute = execute  # pyright: ignore
    with pytest.raises(Diverged, match=r"step 1: loss nan.*every gradient is finite"):
        loop.advance(0, 0, 2)  # pyright: ignore
