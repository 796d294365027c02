"""When everything happens."""

import pytest

from axon.errors import UserError
from axon.parallel.pipeline import Chunks, Work
from axon.parallel.pipeline.table import Action
from axon.parallel.pipeline.timeline import timeline

F, B, W = Action.FORWARD, Action.BACKWARD, Action.BACKWARD_WEIGHT
COSTS = {F: 2.0, B: 5.0}


def cost(piece):
    return sum(COSTS[work.action] for work in piece)


def test_work_begins_when_the_stage_and_its_inputs_are_there():
    orders = [[(Work(F, 0),), (Work(F, 1),), (Work(B, 0),)], [(Work(F, 0),), (Work(B, 0),), (Work(F, 1),)]]
    times = {(one.stage, str(*one.piece)): (one.start, one.end) for one in timeline(orders, Chunks(2), cost)}
    assert times == {
        (0, "F0"): (0, 2), (0, "F1"): (2, 4), (1, "F0"): (2, 4), (1, "B0"): (4, 9),
        (0, "B0"): (9, 14), (1, "F1"): (9, 11),
    }  # fmt: skip


def test_a_piece_has_all_its_results_at_its_end():
    orders = [[(Work(F, 0), Work(F, 1))], [(Work(F, 0),)]]
    assert timeline(orders, Chunks(2), cost)[-1].start == 4


def test_what_nobody_does_was_done_before():
    assert timeline([[(Work(B, 0),)]], Chunks(1), cost)[0].start == 0


def test_stages_that_wait_for_each_other_are_named():
    orders = [[(Work(B, 0),), (Work(F, 0),)], [(Work(F, 0),), (Work(B, 0),)]]
    with pytest.raises(UserError, match="stage 0 waits for ever to do B0: the orders of the stages form a circle"):
        timeline(orders, Chunks(2), cost)
