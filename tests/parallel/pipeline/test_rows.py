"""The rows that an executor runs over are the table, its slots, and where the loss's gradients wait."""

import numpy as np
import pytest

from axon.parallel.pipeline import (
    NONE,
    Action,
    DualPipeV,
    GPipe,
    Interleaved,
    OneFOneB,
    ZeroBubbleH1,
    ZeroBubbleV,
    lockstep,
)
from axon.parallel.pipeline.rows import rows

SCHEDULES = [GPipe(), OneFOneB(), Interleaved(), Interleaved(3), ZeroBubbleH1(), ZeroBubbleV(), DualPipeV()]
BACKWARDS = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


def of_schedule(schedule, rng):
    return lockstep(schedule.table(int(rng.integers(2, 6)), int(rng.integers(1, 13))))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_microbatch_enters_leaves_and_begins_once(schedule, rng):
    table = of_schedule(schedule, rng)
    found, _ = rows(table)
    for ticks in (found.entering, found.leaving, found.beginning):
        assert sorted(ticks[ticks != NONE]) == list(range(table.microbatches))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_loss_gradient_waits_in_its_slot_until_the_last_backward_has_read_it(schedule, rng):
    table = of_schedule(schedule, rng)
    found, pools = rows(table)
    stage, chunk = table.chunks.home(table.chunks.total - 1)
    waiting: dict[int, int] = {}
    for tick in range(table.ticks):
        action, microbatch, of = table.work(tick, stage)
        if action == Action.FORWARD and of == chunk:
            slot = int(found.loss[tick, stage])
            assert slot not in waiting
            assert slot < pools.gradients - 1
            waiting[slot] = microbatch
        elif action in BACKWARDS and of == chunk:
            assert waiting[int(found.gradient[tick, stage])] == microbatch
            if action != Action.BACKWARD_INPUT:
                del waiting[int(found.gradient[tick, stage])]
    assert not waiting


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_gradients_of_the_loss_and_of_other_stages_have_slots_of_their_own(schedule, rng):
    table = of_schedule(schedule, rng)
    found, pools = rows(table)
    spare = pools.gradients - 1
    from_loss, sent = set(found.loss.flat) - {spare}, set(found.gradient_arrives.flat) - {spare}
    assert from_loss
    assert not from_loss & sent
    assert max(from_loss | sent) == spare - 1


def test_idle_stages_read_and_write_the_slot_that_nobody_needs(rng):
    table = of_schedule(OneFOneB(), rng)
    found, pools = rows(table)
    idle = table.action == Action.IDLE
    assert np.all(found.input[idle] == pools.inputs - 1)
    assert np.all(found.gradient[idle] == pools.gradients - 1)
    assert np.all(found.active == ~idle)
