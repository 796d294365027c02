"""DualPipe-V loses the time and keeps the microbatches of its authors' table."""

import pytest

from axon.parallel.pipeline import Action, Costs, DualPipeV, figures


def test_the_authors_bubble_for_pairs_that_run_as_one(rng):
    for _ in range(10):
        stages = int(rng.integers(1, 11))
        weights, forward, inputs = sorted(rng.uniform(0.5, 2, 3))
        pair = (forward + inputs + weights) * rng.uniform(0.8, 1)
        pair = max(pair, inputs + weights)
        found = figures(
            DualPipeV().table(stages, int(rng.integers(2 * stages, 4 * stages))), Costs(forward, inputs, weights, pair)
        )
        lost = (stages - 1) * (pair + inputs + weights - 3 * weights) / 2  # a chunk costs half of what a stage does
        assert found.time - found.busy[-1] == pytest.approx(lost, abs=1e-9)


def test_half_of_it_is_lost_if_pairs_run_one_after_the_other(rng):
    stages = int(rng.integers(1, 11))
    table = DualPipeV().table(stages, int(rng.integers(2 * stages, 4 * stages)))
    apart, paired = figures(table), figures(table, Costs(pair=3))
    assert apart.time - apart.busy == pytest.approx((stages - 1) / 2)
    assert paired.time - paired.busy == pytest.approx(stages - 1)


def test_memory_is_one_pair_more_than_the_v_has_chunks(rng):
    stages = int(rng.integers(1, 11))
    assert (figures(DualPipeV().table(stages, 3 * stages)).stash == 2 * stages + 1).all()


def test_most_of_it_is_forwards_and_whole_backwards_in_turn():
    table = DualPipeV().table(4, 20)
    assert (table.action == Action.BACKWARD).sum() > 0.6 * 2 * 4 * 20
    pairs = "F5 B1/1 F4/1 B0"
    assert any(pairs in " ".join(map(str, order)) for order in table.orders())
