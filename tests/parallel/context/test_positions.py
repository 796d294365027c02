"""Which positions a device has, where a sequence is stored for a ring of another size than it is split over."""

import numpy as np
import pytest

from axon.layout import zigzag
from axon.parallel.context import Positions


@pytest.mark.parametrize(
    ("ring", "size", "runs"), [(4, 4, 2), (4, 2, 2), (4, 1, 1), (4, 8, 1), (2, 6, 2), (6, 2, 2), (1, 4, 1), (3, 9, 2)]
)
def test_every_devices_part_is_runs_of_positions_once_it_is_sorted(ring, size, runs):
    """Nine pieces of three devices' parts of two chunks each: the middle one has the end of a chunk and a beginning."""
    seq = 72
    stored = zigzag(ring, seq) if ring > 1 else np.arange(seq)
    found = Positions.of(stored, size)
    parts = stored.reshape(size, -1)[:, found.order]
    assert found.starts.shape == (size, runs)
    np.testing.assert_array_equal(parts, (found.starts[:, :, None] + np.arange(found.length)).reshape(size, -1))


@pytest.mark.parametrize(("ring", "shorter"), [(4, 2), (8, 2), (6, 3)])
def test_sorted_a_part_for_a_longer_ring_is_that_of_a_shorter_one(ring, shorter):
    stored = zigzag(ring, 96)
    found = Positions.of(stored, shorter)
    np.testing.assert_array_equal(stored.reshape(shorter, -1)[:, found.order].reshape(-1), zigzag(shorter, 96))
