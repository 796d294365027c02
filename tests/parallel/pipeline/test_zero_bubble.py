"""Zero-bubble schedules lose the time that their papers say."""

import numpy as np
import pytest

from axon.parallel.pipeline import Costs, ZeroBubbleH1, ZeroBubbleV, figures


@pytest.mark.parametrize("equal", [True, False])
def test_h1_loses_a_forward_and_an_inputs_backward_less_one_for_weights_for_each_stage_but_one(equal, rng):
    for _ in range(15):
        stages = int(rng.integers(1, 13))
        microbatches = int(rng.integers(stages, 3 * stages + 2))
        forward, inputs = rng.uniform(1, 3, 2)
        costs = Costs() if equal else Costs(forward, inputs, rng.uniform(0.1, min(forward, inputs)))
        found = figures(ZeroBubbleH1().table(stages, microbatches), costs)
        lost = (stages - 1) * (costs.forward + costs.backward_input - costs.backward_weight)
        assert found.time - found.busy == pytest.approx(lost, abs=1e-9)


def test_h1_keeps_no_more_than_the_first_stage_of_1f1b(rng):
    for _ in range(10):
        stages, microbatches = int(rng.integers(1, 13)), int(rng.integers(1, 30))
        found = figures(ZeroBubbleH1().table(stages, microbatches))
        np.testing.assert_array_equal(found.stash, [min(stages, microbatches)] * stages)


def test_the_v_has_no_bubble_on_any_stage_if_all_parts_cost_the_same(rng):
    for _ in range(10):
        stages = int(rng.integers(1, 13))
        microbatches = int(rng.integers(2 * stages - 1, 3 * stages + 2))
        found = figures(ZeroBubbleV().table(stages, microbatches), Costs(2, 2, 2))
        assert found.span == pytest.approx(found.busy)
        assert found.time - found.busy == pytest.approx(stages - 1)  # until the last stage begins: halves of a forward
        assert (found.stash == min(2 * stages, 2 * microbatches)).all()


def test_the_v_is_worth_it_for_other_costs_too(rng):
    """Less than 1F1B's bubble of a step that ends for all stages at once."""
    for _ in range(10):
        stages, costs = int(rng.integers(2, 9)), Costs(*rng.uniform(1, 1.5, 3))
        found = figures(ZeroBubbleV().table(stages, 4 * stages), costs)
        assert (found.bubble < 0.5 * (stages - 1) / (4 * stages)).all()
