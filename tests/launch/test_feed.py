"""Each of two real processes reads its sequences of the global batch; every device holds what it would in one process.

(`axon.train.feed`, tried here because it takes processes to try it.)
"""

import pytest

BATCH, SEQ = 8, 12
CROSSED = {"mesh": {"tensor": 2, "data": 2}, "rows": {"batch": ("data", "tensor")}, "order": ("tensor", "data")}
LAYOUTS = [
    ({"mesh": {"data": 4}}, [range(4), range(4, 8)]),
    ({"mesh": {"data": -1}}, [range(4), range(4, 8)]),
    ({"mesh": {"tensor": 4}}, [range(8), range(8)]),
    ({"mesh": {"data": 2, "tensor": 2}}, [range(4), range(4, 8)]),
    ({"mesh": {"context": 4}}, [range(8), range(8)]),
    ({"mesh": {"data": 2, "context": 2}}, [range(4), range(4, 8)]),
    ({"mesh": {"context": 2, "tensor": 2}}, [range(8), range(8)]),
    ({"mesh": {"replica": 2, "data": 2}}, [range(4), range(4, 8)]),
    (CROSSED, [[0, 1, 4, 5], [2, 3, 6, 7]]),
]
SCRIPT = """
from axon.data import Data, Synthetic
from axon.layout import Layout, Placement
from axon.train import feed
from axon.train.evaluate import BATCH
sequences, seq, layouts = ARGUMENTS
corpus = Data(seq=seq, batch=sequences, sources=(Synthetic(50, 200, 40),), held_out=0.3).prepare(str)
whole = {"train": corpus.train(3, 11), "held_out": corpus.held_out()}
whole = {split: [next(batches) for _ in range(2)] for split, batches in whole.items()}
for number, layout in enumerate(layouts):
    sharding = Placement.of(Layout(**layout)).sharding(BATCH)
    mine = feed.host_sequences(sharding, (sequences, seq))
    right = True
    for split, batches in {"train": corpus.train(3, 11, mine), "held_out": corpus.held_out(sequences=mine)}.items():
        for expected, read in zip(whole[split], batches):
            assert len(read["tokens"]) == len(mine)
            for name, array in feed.place(sharding, read, mine, sequences).items():
                assert array.shape == (sequences, seq) and array.sharding == sharding
                for shard in array.addressable_shards:
                    right &= bool((np.asarray(shard.data) == expected[name][shard.index]).all())
    told[number] = [mine.tolist(), right]
"""


@pytest.fixture(scope="module")
def told(two_processes):
    return two_processes(f"ARGUMENTS = {BATCH}, {SEQ}, {[layout for layout, _ in LAYOUTS]}\n" + SCRIPT)


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[str(layout) for layout, _ in LAYOUTS])
def test_each_process_reads_its_own_sequences_and_the_devices_hold_the_one_process_batch(told, number):
    _, expected = LAYOUTS[number]
    for process in range(2):
        sequences, right = told[process][str(number)]
        assert sequences == list(expected[process])
        assert right
