"""Activations in the host's memory: bytes, and the seconds that no work hides."""

from dataclasses import replace

import pytest
from planning import program

from axon.axes import Execution
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.layout import Layout, Placement
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.memory import memory, on_host
from axon.plan.predict.seconds import OFFLOADED, REPEATED, seconds
from axon.plan.predict.shards import Shards, Split
from axon.plan.predict.work import Work

TARGET = Target.of("v5p:2x2x1", dict(CHIPS))


@pytest.fixture(scope="module")
def work():
    return Work.of(program())


def shards(work, remat, **fields):
    layout = Layout(**{"mesh": {"data": 4}, "zero": 3} | fields)
    return Shards(Split(work, Placement.described(layout, 4, "tpu")), layout, Execution(remat=remat))


def everything(work):
    return dict.fromkeys([*work.names, "input"], "offload")


def test_what_is_offloaded_waits_on_the_host_in_place_of_the_device(work):
    kept, sent = shards(work, "minimal"), shards(work, everything(work))
    (period,) = work.periods
    size = memory(kept).parts["activations"]
    shared = sent.tokens * period.under("minimal").kept.shared
    assert on_host(sent) == pytest.approx(size - shared, rel=0.01)
    assert memory(sent).parts["activations"] == pytest.approx((size - shared) / period.times + shared, rel=0.05)
    assert on_host(kept) == 0


def test_what_is_offloaded_is_not_computed_again(work):
    of = {name: seconds(shards(work, remat), TARGET).of(REPEATED) for name, remat in (
        ("minimal", "minimal"), ("full", "full"), ("all", everything(work)), ("input", {"input": "offload"}),
    )}  # fmt: skip
    assert of["all"] == of["minimal"] < of["full"] == of["input"]


@pytest.mark.parametrize("micro", [1, 2])
def test_activations_go_and_come_over_the_hosts_link_while_the_layers_work(work, micro, rng):
    one = shards(work, everything(work), microbatches=micro)
    rate = float(rng.uniform(1e9, 1e11))
    found = seconds(one, TARGET, replace(Bandwidths.of(TARGET), host=rate))
    (line,) = (line for line in found.lines if line.name == OFFLOADED)
    assert line.seconds == pytest.approx(2 * micro * on_host(one) / rate)
    fast, slow = (seconds(one, TARGET, replace(Bandwidths.of(TARGET), host=rate)) for rate in (1e18, 1e3))
    assert fast.of(OFFLOADED) == 0
    assert slow.total > fast.total
    assert slow.of(OFFLOADED) == pytest.approx(2 * micro * on_host(one) / 1e3, rel=1e-3)


def test_on_stages_the_host_has_what_waits_in_all_slots(work):
    fields = {"mesh": {"pipe": 2, "data": 2}, "zero": 1, "microbatches": 4}
    sent, kept = shards(work, everything(work), **fields), shards(work, "minimal", **fields)
    assert on_host(sent) > memory(kept).parts["activations"] / 2
    assert memory(sent).parts["activations"] < memory(kept).parts["activations"] / 2
