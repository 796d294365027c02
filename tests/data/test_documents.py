"""Which documents a batch is of, against counting through all tokens; and the order without some batches."""

import itertools

import numpy as np
import pytest

from axon.data import Data, Folder, Synthetic
from axon.data.batches import numbered_without


@pytest.fixture(scope="module")
def corpus(caches, text):
    sources = (Synthetic(50, 60, 40), Folder(str(text)))
    return Data(seq=16, batch=6, sources=sources, held_out=0.2).prepare(lambda _: None)


def test_documents_are_those_of_the_tokens(corpus, rng):
    step, seed = int(rng.integers(100)), int(rng.integers(1000))
    with corpus.train(seed, step) as batches:
        batch = next(batches)["tokens"]
    found = corpus.documents(seed, step)
    assert len(found) == 6
    texts = {tuple(sequence) for sequence in batch.tolist()}
    names = list(corpus.describe()["train"])
    for where in found:
        tokens = corpus._sequences["train"].tokens_of(names.index(where["source"]))
        every = tokens.read(np.arange(tokens.count), 1)[:, 0]
        document = np.cumsum(every == corpus.tokenizer.bos) - 1
        own = slice(where["sequence"] * 16, where["sequence"] * 16 + 16)
        assert (where["first"], where["last"]) == (document[own][0], document[own][-1])
        assert tuple(every[own].tolist()) in texts


def test_batches_that_are_left_out_are_and_the_others_keep_their_order(corpus):
    left_out = (3, 4, 9)
    with corpus.train(1) as batches:
        all_ = [batch["tokens"] for batch in itertools.islice(batches, 12)]
    with corpus.train(1, 2, left_out=left_out) as batches:
        fewer = [batch["tokens"] for batch in itertools.islice(batches, 7)]
    expected = [all_[number] for number in range(12) if number not in left_out][2:]
    np.testing.assert_array_equal(fewer, expected)
    assert [numbered_without(k, left_out) for k in range(5)] == [0, 1, 2, 5, 6]
