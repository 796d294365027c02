"""What a schedule costs, on tables small enough to count by hand."""

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import (
    Costs,
    DualPipeV,
    GPipe,
    Interleaved,
    OneFOneB,
    TwoBW,
    ZeroBubbleH1,
    ZeroBubbleV,
    figures,
    lockstep,
)


def test_the_figures_of_two_stages_and_two_microbatches():
    found = figures(GPipe().table(2, 2), Costs(1, 2, 3))
    assert found.time == 3 * (1 + 5)
    np.testing.assert_array_equal(found.busy, [12, 12])
    np.testing.assert_array_equal(found.span, [18, 16 - 4])
    np.testing.assert_array_equal(found.stash, [2, 2])
    assert found.bubble == pytest.approx([0.5, 0.5])


def test_in_lockstep_a_tick_takes_as_long_as_its_longest_action():
    table = OneFOneB().table(2, 2)  # F0 . | . F0 | F1 B0 | B0 F1 | . B1 | B1 .
    assert figures(table, Costs(1, 2, 3)).lockstep == 1 + 1 + 5 + 5 + 5 + 5


SPLIT = [Interleaved(1, split=True), Interleaved(3, split=True), ZeroBubbleH1(), ZeroBubbleV()]
WHOLE = [GPipe(), OneFOneB(), Interleaved(3), DualPipeV()]


@pytest.mark.parametrize("schedule", [*SPLIT, *WHOLE], ids=str)
def test_no_table_in_lockstep_loses_less_than_the_way_to_the_last_stage_and_back(schedule, rng):
    """A microbatch reaches the stage that it reaches last after p − 1 ticks of forwards, and of gradients likewise."""
    stages, times = int(rng.integers(2, 6)), int(rng.integers(2, 5))
    costs = Costs(*rng.uniform(0.5, 2, 3))
    table = lockstep(schedule.table(stages, stages * times))
    passed_on = costs.backward_input + costs.backward_weight * (schedule in WHOLE)
    least = (stages - 1) * (costs.forward + passed_on) / schedule.virtual
    lost = figures(table, costs).lockstep - figures(table, costs).busy.max()
    assert lost >= least * (1 - 1e-9)
    if isinstance(schedule, Interleaved):
        assert lost == pytest.approx(least)


def test_costs_are_of_a_stage_whatever_its_chunks(rng):
    costs = Costs(*rng.uniform(0.5, 2, 3))
    for schedule in (OneFOneB(), Interleaved(3), ZeroBubbleH1(), TwoBW()):
        busy = figures(schedule.table(3, 6), costs).busy
        assert busy == pytest.approx(6 * (costs.forward + costs.backward_input + costs.backward_weight))


def test_a_pair_takes_its_own_time():
    """Of another chunk: 1F1B on one chunk has no pairs."""
    assert figures(OneFOneB().table(2, 4), Costs(pair=1)).time == figures(OneFOneB().table(2, 4)).time


@pytest.mark.parametrize("name", ["forward", "backward_input", "backward_weight", "pair"])
def test_a_cost_is_a_time(name):
    with pytest.raises(UserError, match=rf"Costs\.{name} is 0; must be above 0"):
        Costs(**{name: 0})
