"""Interleaved 1F1B: the bubble is a v-th of 1F1B's, for any number of microbatches."""

import numpy as np
import pytest

from axon.errors import UserError
from axon.parallel.pipeline import Costs, Interleaved, OneFOneB, figures


def drawn(rng):
    return int(rng.integers(1, 13)), int(rng.integers(1, 33)), int(rng.integers(1, 5))


def test_the_bubble_is_stages_less_one_over_virtual_times_microbatches(rng):
    for _ in range(25):
        stages, microbatches, virtual = drawn(rng)
        found = figures(Interleaved(virtual).table(stages, microbatches), Costs(*rng.uniform(0.2, 3, 3)))
        bubble = (stages - 1) / (virtual * microbatches)
        if microbatches < stages:
            bubble = (virtual * stages - 1) / (virtual * microbatches) - (virtual - 1) / virtual
        assert found.bubble == pytest.approx(bubble, abs=1e-9), (stages, microbatches, virtual)


def test_memory_is_that_of_megatron(rng):
    for _ in range(10):
        stages, rounds, virtual = int(rng.integers(1, 9)), int(rng.integers(1, 5)), int(rng.integers(2, 5))
        found = figures(Interleaved(virtual).table(stages, stages * rounds))
        wanted = (virtual + 1) * stages - 2 * np.arange(stages) - 1
        np.testing.assert_array_equal(found.stash, np.minimum(wanted, stages * rounds * virtual))


def test_a_stage_takes_a_group_of_microbatches_through_each_of_its_chunks():
    forwards = [str(work) for work in Interleaved(2).table(2, 4).orders()[0] if str(work).startswith("F")]
    assert forwards == ["F0", "F1", "F0/1", "F1/1", "F2", "F3", "F2/1", "F3/1"]


def test_one_chunk_a_stage_is_1f1b():
    assert Interleaved(1).table(3, 5).orders() == OneFOneB().table(3, 5).orders()


def test_a_stage_has_a_chunk():
    with pytest.raises(UserError, match=r"Interleaved\.virtual is 0; must be at least 1"):
        Interleaved(0)
    with pytest.raises(UserError, match=r"Interleaved\.virtual is 1000000; must be in \[1, 1024\]"):
        Interleaved(1_000_000)
