"""Uniform tables as loops."""

import itertools

import numpy as np
import pytest

from axon.parallel.pipeline import (
    Action,
    DualPipeV,
    GPipe,
    Interleaved,
    OneFOneB,
    TwoBW,
    ZeroBubbleH1,
    ZeroBubbleV,
    ages,
    lockstep,
    phases,
)

F, B, I, W = Action.FORWARD, Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT


@pytest.mark.parametrize(
    "schedule",
    [GPipe(), OneFOneB(), Interleaved(3), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV(), TwoBW()],
    ids=str,
)
def test_phases_are_the_ticks(schedule, rng):
    table = lockstep(schedule.table(int(rng.integers(1, 7)), int(rng.integers(11, 16))))
    found = phases(table)
    ticks = itertools.chain.from_iterable(phase.actions * phase.times for phase in found)
    assert [int(action) for action in ticks] == table.action.max(axis=1).tolist()
    assert [phase.start for phase in found] == [0, *itertools.accumulate(len(p.actions) * p.times for p in found)][:-1]
    assert len(found) <= 9


def test_1f1b_is_three_loops(rng):
    stages, microbatches = int(rng.integers(3, 8)), int(rng.integers(8, 20))
    found = [phase[1:] for phase in phases(lockstep(OneFOneB().table(stages, microbatches)))]
    assert found == [((F,), stages), ((B, F), microbatches - 1), ((B,), stages)]


def test_interleaved_is_three_loops_too(rng):
    stages, rounds = int(rng.integers(3, 8)), int(rng.integers(1, 4))
    found = [phase[1:] for phase in phases(lockstep(Interleaved(2).table(stages, stages * rounds)))]
    middle = 2 * stages * rounds - stages - 1
    assert found == [((F,), 2 * stages), ((B, F), middle), ((B,), 2 * stages)]


def test_a_period_of_a_schedule_without_a_flush_is_three_loops_for_what_is_outside_of_the_stages_has_one_age(rng):
    stages = int(rng.integers(3, 6))
    table = lockstep(TwoBW().table(stages, 2 * stages))
    found = phases(table)
    age = ages(table)
    assert all(set(phase.actions) == {F, B} for phase in found)
    assert sum(phase.times for phase in found) == 2 * stages
    for start, actions, times in found:
        for place in range(len(actions)):
            ticks = age[start + place : start + len(actions) * times : len(actions)]
            assert len(np.unique(ticks[:, [0, -1]], axis=0)) == 1
    assert len(found) == 3


def test_h1_has_weights_between_inputs_and_forwards(rng):
    stages, microbatches = int(rng.integers(3, 8)), int(rng.integers(20, 30))
    found = [phase[1:] for phase in phases(lockstep(ZeroBubbleH1().table(stages, microbatches)))]
    assert found[2] == ((I, W, F), microbatches - stages)
