"""Each of two real processes reads its sequences of the global batch, and every device holds what it would in one.

(`axon.train.feed`, tried here because it takes processes to try it.)
"""

import pytest
from member import LAYOUTS

READ = [
    [range(4), range(4, 8)],
    [range(4), range(4, 8)],
    [range(8), range(8)],
    [range(4), range(4, 8)],
    [range(8), range(8)],
    [range(4), range(4, 8)],
    [range(8), range(8)],
    [range(4), range(4, 8)],
    [[0, 1, 4, 5], [2, 3, 6, 7]],
]
"""The sequences that each process reads, by layout."""


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=map(str, LAYOUTS))
def test_each_process_reads_its_own_sequences_and_the_devices_hold_the_one_process_batch(told, number):
    for process, expected in zip(told, READ[number], strict=True):
        sequences, right = process["feed"][number]
        assert sequences == [*expected]
        assert right
