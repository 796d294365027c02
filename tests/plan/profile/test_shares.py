"""Whose a moment is: against one rank and instant after the other."""

import numpy as np
import pytest

from axon.plan.profile.shares import exclusive


def by_moments(intervals, count):
    own = np.zeros(len(intervals))
    for moment in range(count):
        running = [(rank, i) for i, (begin, end, rank) in enumerate(intervals) if begin <= moment < end]
        first = [i for rank, i in running if rank == max(running)[0]]
        own[first] += 1 / max(1, len(first))
    return own


def test_every_moment_is_shared_by_what_has_the_highest_rank_in_it(rng):
    begins, lengths, ranks = rng.integers(0, 90, 40), rng.integers(0, 30, 40), rng.integers(0, 3, 40)
    intervals = list(zip(begins.tolist(), (begins + lengths).tolist(), ranks.tolist(), strict=True))
    own = exclusive(intervals)
    np.testing.assert_allclose(own, by_moments(intervals, 120), atol=1e-9)
    covered = {moment for begin, end, _ in intervals for moment in range(begin, end)}
    assert sum(own) == pytest.approx(len(covered))


def test_what_is_sent_while_products_run_takes_only_the_rest():
    assert exclusive([(0, 10, 1), (2, 6, 2), (0, 12, 0)]) == [6, 4, 2]
