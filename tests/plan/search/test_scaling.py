"""Scaling: each point is that machine's own best plan, with its own batch, and where there is none it says why."""

from dataclasses import replace

import pytest
from planning import program

from axon.axes import Execution
from axon.chips import CHIPS
from axon.chips.target import Target
from axon.layout import Layout
from axon.plan.predict.failures import Failures
from axon.plan.predict.work import Work
from axon.plan.search import Pins, Planner
from axon.plan.search.scaling import scaling
from axon.plan.search.space import Space

FAILURES = Failures(mtbf=1e8, restart=600.0, save=30.0)
SIZES = {"seq": 512, "embed": 256, "mlp": 1024, "vocab": 4096}


def planner(target, batch, memory=None):
    base = program(batch=batch, **SIZES)
    target = target if memory is None else replace(target, chip=replace(target.chip, memory=memory))
    space = Space(base, target, Layout(), Execution(), Pins())
    return Planner(space, Work.of(base), lambda plan: plan)


def machines(*sizes):
    return [Target.of("h100:2x8", dict(CHIPS)).resized(size) for size in sizes]


def scaled(sizes, batch=32, memory=None):
    start = planner(Target.of("h100:2x8", dict(CHIPS)), batch)
    return scaling(start, machines(*sizes), FAILURES, lambda *to: planner(*to, memory), [].append)


@pytest.fixture(scope="module")
def found():
    return scaled((4, 16, 64))


@pytest.mark.full
@pytest.mark.draws(1)
def test_weak_scaling_keeps_the_sequences_of_a_device_and_strong_scaling_those_of_a_step(found):
    assert [(one.target.devices, one.batch) for one in found.weak] == [(4, 8), (16, 32), (64, 128)]
    assert [(one.target.devices, one.batch) for one in found.strong] == [(4, 32), (16, 32), (64, 32)]
    assert found.weak[1] is found.strong[1]
    assert all(one.tokens == one.batch * 512 for one in (*found.weak, *found.strong))


@pytest.mark.full
@pytest.mark.draws(1)
def test_each_point_is_the_best_plan_of_its_own_machine(found):
    for one in (*found.weak, *found.strong):
        own = planner(one.target, int(one.batch)).best(1)[0]
        assert one.plan.seconds.total == own.seconds.total
        assert one.tokens_per_second == pytest.approx(one.tokens / own.seconds.total)


def test_a_larger_machine_fails_more_often_and_trains_a_smaller_share(found):
    assert [one.between for one in found.weak] == [1e8 / 4, 1e8 / 16, 1e8 / 64]
    assert [one.goodput for one in found.weak] == sorted((one.goodput for one in found.weak), reverse=True)
    for one in found.weak:
        assert one.trained_per_second == pytest.approx(one.tokens_per_second * one.goodput)


@pytest.mark.full
def test_where_there_is_no_plan_it_says_why():
    few = scaled((2, 16), batch=12)
    assert (few.weak[0].plan, few.weak[0].why) == (None, "no whole number of sequences")
    assert few.weak[0].tokens_per_second == 0
    small = scaled((2,), memory=2**20)
    assert small.weak[0].plan is None
    assert "GiB of a device at least" in small.weak[0].why
    none = scaled((1024,), batch=1)
    assert none.strong[0].plan is None
    assert "no layout divides" in none.strong[0].why
