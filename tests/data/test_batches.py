"""Batches: packed sequences against a plain reference, in an order that follows from (seed, step)."""

import itertools
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from axon.data.batches import SMALL, TokenSequences, held_out_order, pack, pad, token_batches, training_order
from scripts.bench import data as throughput_bench

BOS = 7


class Held:
    """Tokens in memory."""

    def __init__(self, tokens: np.ndarray):
        self.count = len(tokens)
        self._tokens = tokens

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        return np.array([self._tokens[start : start + length] for start in starts], np.int32).reshape(-1, length)


@pytest.fixture
def sequences(rng):
    """Three sources of 5 to 60 sequences of 16 positions."""
    tokens = [rng.integers(0, 50, rng.integers(5 * 16 + 1, 60 * 16)) for _ in range(3)]
    return TokenSequences(["a", "b", "c"], [Held(one) for one in tokens], 16)


def reference(sequence: list[int]) -> dict[str, list]:
    """One packed sequence, token by token."""
    out = {"tokens": sequence[:-1], "targets": sequence[1:], "positions": [], "documents": [], "weights": []}
    document, position = 0, 0
    for index, token in enumerate(sequence[:-1]):
        if token == BOS:
            position = 0
            document += index > 0
        out["positions"].append(position)
        out["documents"].append(document)
        out["weights"].append(1.0)
        position += 1
    return out


def test_positions_restart_at_each_document(rng):
    sequences = np.where(rng.random((20, 65)) < 0.1, BOS, rng.integers(8, 50, (20, 65))).astype(np.int32)
    batch = pack(sequences, BOS)
    for index, sequence in enumerate(sequences.tolist()):
        for name, expected in reference(sequence).items():
            assert batch[name][index].tolist() == expected, name


def test_packed_arrays_have_the_types_that_devices_take(rng):
    batch = pack(rng.integers(0, 50, (3, 9)).astype(np.int32), BOS)
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "positions": "int32",
        "documents": "int32",
        "weights": "float32",
    }
    assert all(array.shape == (3, 8) and array.flags.c_contiguous for array in batch.values())


def test_padding_is_no_document_and_weighs_nothing(rng):
    batch = pack(rng.integers(0, 50, (3, 9)).astype(np.int32), BOS)
    padded = pad(batch, 5)
    assert (padded["documents"][3:] == -1).all()
    assert (padded["weights"][3:] == 0).all()
    assert all(np.array_equal(padded[name][:3], batch[name]) for name in batch)


def test_sequences_share_one_token_so_that_each_is_a_target_once(rng):
    tokens = rng.integers(0, 50, 16 * 9 + 5)
    sequences = TokenSequences(["a"], [Held(tokens)], 16)
    read = sequences.read(np.arange(len(sequences)))
    assert len(sequences) == 9
    assert np.array_equal(read[:, 1:].ravel(), tokens[1 : 9 * 16 + 1])
    assert np.array_equal(read[:, :-1].ravel(), tokens[: 9 * 16])


def test_sequences_of_every_source_are_read_in_the_order_asked_for(sequences, rng):
    numbers = rng.permutation(len(sequences))
    together = sequences.read(numbers)
    assert all(np.array_equal(together[at], sequences.read(np.array([number]))[0]) for at, number in enumerate(numbers))


def numbers_of(order, step: int) -> list[int]:
    return np.asarray(order[step]).tolist()


def test_an_epoch_has_every_sequence_once_and_the_next_another_order(sequences):
    order = training_order(sequences, None, 1, seed=5)
    epochs = [
        [numbers_of(order, step)[0] for step in range(e * len(sequences), (e + 1) * len(sequences))] for e in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(len(sequences)))
    assert epochs[0] != epochs[1]


def test_neighbouring_seeds_do_not_share_epochs(sequences):
    first, second = (training_order(sequences, None, len(sequences), seed=seed) for seed in (0, 1))
    assert numbers_of(first, 1) != numbers_of(second, 0)


@pytest.mark.few(weights=[(0.7, 0.2, 0.1)])
@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1, 1, 1), (30, 1, 9)])
def test_a_mixture_follows_its_weights(sequences, weights):
    order = training_order(sequences, weights, 50, seed=2)
    numbers = np.concatenate([order[step] for step in range(40)])
    shares = np.bincount(sequences.source_of(numbers), minlength=3) / len(numbers)
    assert np.abs(shares - np.array(weights) / sum(weights)).max() < 2e-3


def test_without_weights_each_source_is_as_frequent_as_it_is_large(sequences):
    numbers = np.asarray(training_order(sequences, None, len(sequences), seed=2)[0])
    assert np.bincount(sequences.source_of(numbers)).tolist() == sequences.counts


def test_threads_do_not_change_the_batches(sequences):
    order = training_order(sequences, (1, 2, 3), 4, seed=9)
    runs = []
    for threads in (0, 1, 3):
        with token_batches(order, sequences, BOS, 4, slice(None), threads) as batches:
            runs.append([next(batches) for _ in range(12)])
    for one, two, three in zip(*runs, strict=True):
        assert all(np.array_equal(one[name], two[name]) and np.array_equal(one[name], three[name]) for name in one)


def test_the_held_out_sequences_come_once_and_the_last_batch_is_padded(sequences):
    batches = list(token_batches(held_out_order(sequences, 8), sequences, BOS, 8, slice(None), 2))
    assert all(batch["tokens"].shape == (8, 16) for batch in batches)
    real = np.concatenate([batch["tokens"][batch["weights"][:, 0] == 1] for batch in batches])
    expected = sequences.read(np.arange(len(sequences)))[:, :-1]
    assert sorted(map(tuple, real.tolist())) == sorted(map(tuple, expected.tolist()))
    assert sum(batch["weights"].sum() for batch in batches) == len(sequences) * 16


def test_one_sequence_is_enough(rng):
    sequences = TokenSequences(["a"], [Held(rng.integers(0, 50, 17))], 16)
    with token_batches(training_order(sequences, None, 3, seed=1), sequences, BOS, 3, slice(None), 2) as batches:
        assert next(batches)["tokens"].shape == (3, 16)


@pytest.mark.parametrize("weights", [None, (2, 1)])
def test_a_batch_may_be_a_single_sequence_that_is_long(weights, rng):
    sources = [Held(rng.integers(0, 50, 3 * SMALL)) for _ in range(2)]
    sequences = TokenSequences(["a", "b"], sources, SMALL)
    with token_batches(training_order(sequences, weights, 1, seed=1), sequences, BOS, 1, slice(None), 2) as found:
        assert next(found)["tokens"].shape == (1, SMALL)


def test_closed_batches_stop_their_threads(sequences):
    before = set(threading.enumerate())
    batches = token_batches(training_order(sequences, None, 4, seed=0), sequences, BOS, 4, slice(None), 2)
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    batches.close()
    for thread in started:
        thread.join(5)
        assert not thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        next(batches)


ABANDON = """
import numpy as np
from axon.data import Data, Synthetic
batches = Data(16, 4, (Synthetic(50, 40, 40),), held_out=0).prepare(lambda line: None).train(0)
next(batches)
print("left", flush=True)
"""


def test_a_program_that_forgets_to_close_still_ends():
    done = subprocess.run([sys.executable, "-c", ABANDON], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "left\n"
    assert done.stderr == ""


def test_throughput_counts_tokens(sequences, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(throughput_bench, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    with token_batches(training_order(sequences, None, 4, seed=0), sequences, BOS, 4, slice(None), 2) as batches:
        assert throughput_bench.throughput(batches, 5) == 4 * 4 * 16 / 5  # one batch for each second but the last
