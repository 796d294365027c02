"""Tables that go on without a flush."""

import numpy as np
import pytest

from axon.parallel.pipeline import Action, OneFOneB, TwoBW, ages, check, figures, unrolled


def test_a_flush_leaves_nothing_for_the_next_batch():
    assert not ages(OneFOneB().table(4, 5)).any()


def test_what_is_in_flight_at_the_end_is_finished_in_the_next_period(rng):
    stages = int(rng.integers(2, 7))
    table = TwoBW().table(stages, int(rng.integers(stages, 12)))
    age = ages(table)
    assert set(np.unique(age)) == {0, 1}
    assert (age[table.action == Action.BACKWARD].reshape(-1, stages)[: stages - 1, 0] == 1).all()
    first = (table.action == Action.FORWARD) & (table.microbatch == 0)
    assert not age[first].any()


@pytest.mark.parametrize("schedule", [TwoBW(), OneFOneB()])
def test_batches_one_after_another_are_a_right_table(schedule, rng):
    stages, periods = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    microbatches = int(rng.integers(stages, 9))
    table = unrolled(schedule.table(stages, microbatches), periods)
    assert table.microbatches == periods * microbatches
    check(table)


def test_batches_without_a_flush_fill_the_pipeline_once(rng):
    stages, microbatches = 4, int(rng.integers(4, 9))
    found = figures(unrolled(TwoBW().table(stages, microbatches), 5))
    assert found.bubble == pytest.approx((stages - 1) / (5 * microbatches))


def test_a_gradient_is_of_weights_at_most_one_version_old(rng):
    for _ in range(10):
        stages = int(rng.integers(1, 17))
        assert ages(TwoBW().table(stages, int(rng.integers(stages, 40)))).max() <= 1
