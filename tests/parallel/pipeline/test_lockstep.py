"""Uniform ticks: what one program for all stages takes."""

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import (
    Action,
    Costs,
    DualPipeV,
    GPipe,
    Interleaved,
    OneFOneB,
    TwoBW,
    ZeroBubbleH1,
    ZeroBubbleV,
    check,
    figures,
    lockstep,
)


def ticks(table, action):
    return int((table.action == action).any(axis=1).sum())


def drawn(rng):
    stages = int(rng.integers(1, 9))
    return stages, int(rng.integers(2 * stages, 4 * stages + 1)), Costs(*rng.uniform(0.5, 2, 3))


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), Interleaved(2), Interleaved(3)], ids=str)
def test_whole_backwards_in_a_loop_lose_no_time(schedule, rng):
    for _ in range(4):
        stages, microbatches, costs = drawn(rng)
        table = schedule.table(stages, microbatches)
        assert figures(lockstep(table), costs).lockstep == pytest.approx(figures(table, costs).time)


def test_1f1b_keeps_what_goes_to_the_last_stage_and_back(rng):
    stages, microbatches, _ = drawn(rng)
    found = figures(lockstep(OneFOneB().table(stages, microbatches)))
    wanted = np.minimum(microbatches, 2 * (stages - 1 - np.arange(stages)) + 1)
    np.testing.assert_array_equal(found.stash, wanted)


def test_interleaved_keeps_no_more_than_without(rng):
    stages, rounds = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    table = Interleaved(2).table(stages, stages * rounds)
    np.testing.assert_array_equal(figures(lockstep(table)).stash, figures(table).stash)


@pytest.mark.parametrize("schedule", [ZeroBubbleH1(), ZeroBubbleV(), DualPipeV()], ids=str)
def test_split_backwards_lose_the_fill_of_forwards_and_of_inputs(schedule, rng):
    """A V's two chunks double its fill, in halves of a stage's work: the time is that of H1."""
    for _ in range(3):
        stages, microbatches, costs = drawn(rng)
        found = figures(lockstep(schedule.table(stages, microbatches)), costs)
        lost = (stages - 1) * (costs.forward + costs.backward_input)
        assert found.lockstep - found.busy == pytest.approx(lost)


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(2), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV()], ids=str)
def test_each_action_has_its_work_in_the_order_of_the_table(schedule, rng):
    stages, microbatches, _ = drawn(rng)
    table = schedule.table(stages, microbatches)
    for before, after in zip(table.orders(), lockstep(table).orders(), strict=True):
        for kind in (Action.FORWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT):
            assert done(after, kind) == done(before, kind)


def done(order, kind):
    kinds = (kind,) if kind == Action.FORWARD else (kind, Action.BACKWARD)
    return [work[1:] for work in order if work.action in kinds]


def test_no_uniform_order_of_1f1b_takes_fewer_ticks(rng):
    """Each stage has m forwards, and the last begins p − 1 ticks after the first: so of backwards."""
    stages, microbatches, _ = drawn(rng)
    table = lockstep(OneFOneB().table(stages, microbatches))
    assert ticks(table, Action.FORWARD) == ticks(table, Action.BACKWARD) == microbatches + stages - 1


def test_without_a_flush_there_is_no_bubble_in_lockstep_either(rng):
    stages = int(rng.integers(1, 6))
    table = lockstep(TwoBW().table(stages, int(rng.integers(2 * stages - 1, 16))))
    check(table)
    found = figures(table)
    assert table.uniform
    assert found.lockstep == pytest.approx(found.busy)


def test_without_a_flush_a_batch_is_longer_than_the_way_there_and_back():
    with pytest.raises(UserError, match=r"6 microbatches on 4 stages in lockstep .* Use 7 microbatches or more"):
        lockstep(TwoBW().table(4, 6))
