"""GPipe, 1F1B and 1F1B without a flush: bubble and memory by the papers' formulas."""

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import Action, Costs, GPipe, OneFOneB, TwoBW, figures, slots


def drawn_costs(rng) -> Costs:
    return Costs(*rng.uniform(0.2, 3, 3))


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()])
def test_the_bubble_is_stages_less_one_over_microbatches(schedule, rng):
    for _ in range(20):
        stages, microbatches = int(rng.integers(1, 17)), int(rng.integers(1, 40))
        found = figures(schedule.table(stages, microbatches), drawn_costs(rng))
        assert found.bubble == pytest.approx((stages - 1) / microbatches)


def test_gpipe_keeps_every_microbatch_and_one_f_one_b_as_many_as_there_are_stages_to_come(rng):
    for _ in range(20):
        stages, microbatches = int(rng.integers(1, 17)), int(rng.integers(1, 40))
        assert (figures(GPipe().table(stages, microbatches)).stash == microbatches).all()
        table = OneFOneB().table(stages, microbatches)
        wanted = np.minimum(microbatches, stages - np.arange(stages))
        np.testing.assert_array_equal(figures(table).stash, wanted)
        np.testing.assert_array_equal(slots(table).inputs, wanted)


def test_gpipe_goes_backward_in_reverse_as_autodiff_does():
    order = GPipe().table(3, 4).orders()[1]
    assert [str(work) for work in order] == ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]


def test_without_a_flush_there_is_no_bubble_and_no_more_memory(rng):
    for _ in range(8):
        stages = int(rng.integers(1, 10))
        microbatches = int(rng.integers(stages, 30))
        table, costs = TwoBW().table(stages, microbatches), drawn_costs(rng)
        found = figures(table, costs)
        assert found.bubble == pytest.approx(0, abs=1e-9)
        assert found.busy == pytest.approx(
            microbatches * (costs.forward + costs.backward_input + costs.backward_weight)
        )
        np.testing.assert_array_equal(found.stash, stages - np.arange(stages))
        assert (table.action != Action.IDLE).all()


def test_two_versions_of_weights_are_too_few_for_fewer_microbatches_than_stages():
    with pytest.raises(
        UserError, match=r"TwoBW keeps two versions.*3 microbatches and 4 stages\. Use 4 microbatches or"
    ):
        TwoBW().table(4, 3)


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()])
def test_a_pipeline_has_a_microbatch(schedule):
    with pytest.raises(UserError, match="at least one microbatch; got 0"):
        schedule.table(4, 0)
