"""Where values wait."""

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import (
    NONE,
    SHIFTS,
    Chunks,
    Interleaved,
    OneFOneB,
    Table,
    TwoBW,
    ZeroBubbleH1,
    ZeroBubbleV,
    figures,
    lockstep,
    slots,
)


def test_two_stages_of_1f1b_by_hand():
    memory = slots(OneFOneB().table(2, 2))  # F0 . | . F0 | F1 B0 | B0 F1 | . B1 | B1 .
    N = NONE
    np.testing.assert_array_equal(memory.input, [[0, N], [N, 0], [1, 0], [0, 0], [N, 0], [1, N]])
    np.testing.assert_array_equal(memory.gradient, [[N, N], [N, N], [N, N], [0, N], [N, N], [0, N]])
    down = SHIFTS.index(1)  # and up: of two stages each comes after the other
    np.testing.assert_array_equal(np.argwhere(memory.input_arrives[:, down] == 0), [[0, 1], [2, 1]])
    np.testing.assert_array_equal(np.argwhere(memory.gradient_arrives != NONE)[:, [0, 2]], [[2, 0], [4, 0]])
    np.testing.assert_array_equal(memory.inputs, [2, 1])
    np.testing.assert_array_equal(memory.gradients, [1, 0])
    np.testing.assert_array_equal(memory.shift, [[1, 0], [0, 0], [1, 1], [0, 0], [0, 1], [0, 0]])


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(2), ZeroBubbleH1(), ZeroBubbleV()], ids=str)
def test_inputs_take_little_more_than_what_is_between_forward_and_backward(schedule, rng):
    """What arrives early waits too, on a stage that is about to free another slot."""
    for _ in range(5):
        table = schedule.table(int(rng.integers(1, 9)), int(rng.integers(1, 17)))
        for one in (table, lockstep(table)):
            more = slots(one).inputs - figures(one).stash
            assert more.min() >= 0
            assert more.max() <= 3


def test_a_v_turns_without_leaving_its_stage():
    table = ZeroBubbleV().table(3, 5)
    memory = slots(table)
    forwards = np.argwhere((table.action == 1) & (table.chunk == 0))
    assert {int(memory.shift[tick, stage]) for tick, stage in forwards if stage == 2} == {0}
    assert {int(memory.shift[tick, stage]) for tick, stage in forwards if stage < 2} == {1}
    assert (memory.input_arrives[:, SHIFTS.index(0), 2] != NONE).sum() == 5


def test_a_loop_goes_around():
    table = Interleaved(2).table(3, 3)
    memory = slots(table)
    turn = np.argwhere((table.action == 1) & (table.chunk == 0))
    assert {int(memory.shift[tick, stage]) for tick, stage in turn} == {1}


def test_a_slot_per_value_in_flight_without_a_flush_if_rounds_fit(rng):
    stages = int(rng.integers(1, 9))
    table = TwoBW().table(stages, 4 * stages)
    assert slots(table).inputs.max() == stages


def test_a_value_waits_for_less_than_a_period():
    assert slots(periodic([[1], [2]])).inputs == [1]
    with pytest.raises(UserError, match="use more microbatches"):
        slots(periodic([[2, 0], [1, 1], [0, 2]]))


def periodic(actions: list[list[int]]) -> Table:
    """A table of one microbatch without a flush."""
    action = np.array(actions)
    return Table(action, 0 * action, 0 * action, 1, Chunks(action.shape[1]), flush=False)
