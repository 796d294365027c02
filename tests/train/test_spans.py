"""Span corruption: what encoder and decoder are given puts the sequence together again."""

from functools import cache

import jax
import numpy as np
import pytest

from axon.errors import UserError
from axon.train.objective import SEQUENCES
from axon.train.spans import SpanCorruption
from models.llama import Llama
from models.t5 import T5

VOCAB, ROWS, SEQ = 1000, 32, 200
MODULE = T5(VOCAB, 8, 1, 1, 2, 4, 8).build()


@cache
def compiled(objective):
    return jax.jit(lambda batch, step: objective.draw(MODULE, batch, jax.random.key(step)))


def drawn(objective, batch, step=0):
    numbers = np.arange(ROWS, dtype=np.int32)
    return jax.device_get(compiled(objective)({**batch, SEQUENCES: numbers}, np.uint32(step)))


def put_together(read, targets, first_sentinel):
    """The sequence: each sentinel that was read, replaced by what follows it in the targets."""
    spans, current = {}, None
    for token in targets:
        if token >= first_sentinel:
            current = spans.setdefault(int(token), [])
        else:
            current.append(int(token))
    return [one for token in read for one in (spans[int(token)] if token >= first_sentinel else [int(token)])], spans


@pytest.mark.parametrize("sentinel", [None, 900])
def test_encoder_and_decoder_have_every_token_once(sentinel, rng):
    objective = SpanCorruption(sentinel_id=sentinel)
    noise, count = objective.sizes(SEQ)
    first = VOCAB - 1 if sentinel is None else sentinel
    tokens = rng.integers(1, first - count, (ROWS, SEQ), dtype=np.int32)
    found = drawn(objective, {"tokens": tokens, "weights": np.ones((ROWS, SEQ), np.float32)})
    assert found["tokens"].shape[1] == found["documents"].shape[1] == 184  # of 200 − 30 + 10
    lengths = []
    for i, expected in enumerate(tokens):
        read = found["tokens"][i][found["documents"][i] == 0]
        targets = found["targets"][i][found["counted"][i] > 0]
        again, spans = put_together(read, targets, first - count)
        np.testing.assert_array_equal(again, expected)
        assert list(spans) == [first - n for n in range(count + 1)]
        np.testing.assert_array_equal(found["written"][i][: len(targets)], [0, *targets[:-1]])
        lengths += [len(span) for span in spans.values()][:-1]
    assert len(lengths) == ROWS * count
    assert sum(lengths) == ROWS * noise
    assert 1 == min(lengths) < 3 < max(lengths)


def test_padding_is_neither_seen_nor_counted():
    weights = np.tile((np.arange(SEQ) < 120).astype(np.float32), (ROWS, 1))
    found = drawn(SpanCorruption(), {"tokens": np.ones((ROWS, SEQ), np.int32), "weights": weights})
    read, written = (np.sum(found[name] == 0, axis=1) for name in ("documents", "written_documents"))
    np.testing.assert_array_equal(written, found["counted"].sum(axis=1))
    assert np.all((read + written > 120) & (read + written < 120 + 2 * 10 + 1))


def test_the_draw_is_another_in_another_step_and_the_same_in_the_same(rng):
    batch = {"tokens": rng.integers(1, 900, (ROWS, SEQ), dtype=np.int32), "weights": np.ones((ROWS, SEQ), np.float32)}
    one, same, other = (drawn(SpanCorruption(), batch, step)["targets"] for step in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any(axis=1).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SpanCorruption(density=1.0), "SpanCorruption.density is 1.0; must be in (0, 1)"),
        (
            lambda: SpanCorruption(density=0.9, span=1.0).sizes(10),
            "SpanCorruption: 9 of 10 tokens in 9 spans leave fewer than one between each two",
        ),
        (lambda: SpanCorruption().check(Llama(8, 8, 1, 2, 2, 8).build()), "SpanCorruption needs a model with encode"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(UserError) as caught:
        wrong()
    assert message in str(caught.value)
