"""Where the parts of a model are."""

import pytest

from axon.parallel.pipeline import Chunks


@pytest.mark.parametrize("placement", ["loop", "V"])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_every_logical_chunk_has_one_home(placement, virtual, rng):
    chunks = Chunks(int(rng.integers(1, 9)), virtual, placement)
    homes = [chunks.home(logical) for logical in range(chunks.total)]
    assert len(set(homes)) == chunks.total
    assert [chunks.logical(*home) for home in homes] == list(range(chunks.total))


def test_a_loop_goes_on_from_the_last_stage_to_the_first():
    assert [Chunks(3, 2).home(logical)[0] for logical in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_v_turns_on_the_last_stage_and_ends_on_the_first():
    assert [Chunks(3, 2, "V").home(logical)[0] for logical in range(6)] == [0, 1, 2, 2, 1, 0]
