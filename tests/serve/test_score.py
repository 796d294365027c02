"""Scores of continuations: against the log-softmax of a plain forward pass over each sequence alone."""

import math
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import VOCAB, random_values

from axon.layout import Layout, sequence_parallel
from axon.nn import Inputs, LongRopeScaling, Rope
from axon.runtime import Runtime
from axon.serve.score import SEQUENCES, Score, Scorer
from axon.serve.teacher_forcing import SHORTEST, Continuation
from models.gemma import Gemma
from models.llama import Llama
from models.t5 import T5, T5Model

LLAMA = Llama(vocab=VOCAB, embed=32, layers=2, heads=4, kv_heads=2, mlp=48)
GEMMA = Gemma(VOCAB, 32, 5, 4, 2, 48, 8, window=6, soft_cap=5.0, logit_soft_cap=30.0)

ANSWERS = T5(VOCAB, 32, 1, 1, heads=4, head_dim=8, mlp=48, buckets=8, max_distance=20, start_id=3)


def runtime_on(model, layout) -> Runtime:
    devices = jax.devices()[: math.prod(layout.get("mesh", {}).values())]
    return Runtime(model, Layout(**layout), devices=devices, seq=16)


def log_softmax(runtime, values, context, tokens):
    """`seq vocab`, of what follows `context` and each of `tokens`: one continuation alone and unpadded."""
    answers = isinstance(runtime.module, T5Model)
    texts = (context, [3, *tokens]) if answers else ([*context, *tokens],)
    with runtime.tracing():
        found = logits_of(runtime)(values, *(np.array([text], np.int32) for text in texts))
    found = np.asarray(found, np.float64)[0 if answers else len(context) - 1 :]
    return found - np.log(np.sum(np.exp(found), axis=-1, keepdims=True))


@lru_cache(maxsize=2)
def logits_of(runtime):
    """Compiled for each length: of what is written, after what is read where that is another text."""

    def logits(values, *texts):
        model = runtime.bind(values)
        *read, written = map(inputs, texts)
        if read:
            hidden, _ = model.decode(written, model.encode(read[0])[0], read[0].documents)
        else:
            hidden = model.hidden(written)[0]
        return model.output.logits(hidden)[0]

    return jax.jit(logits)


def inputs(tokens):
    return Inputs(tokens, jnp.arange(tokens.shape[1])[None], jnp.zeros_like(tokens))


def plain(runtime, values, one: Continuation) -> Score:
    likely = log_softmax(runtime, values, one.context, one.tokens[:-1])
    each = likely[np.arange(len(one.tokens)), one.tokens]
    return Score(each.sum(), bool((likely.argmax(axis=-1) == one.tokens).all()))


def greedy_tokens(runtime, values, context, count):
    ids = []
    for _ in range(count):
        ids.append(int(log_softmax(runtime, values, context, ids)[-1].argmax()))
    return ids


def drawn(rng, *sizes):
    return [Continuation(*(rng.integers(0, VOCAB, size).tolist() for size in one)) for one in sizes]


def scores(scorer, values, continuations, **options):
    found = dict(scorer(values, {}, continuations, **options))
    return [found[place] for place in range(len(continuations))]


def check(found, expected):
    np.testing.assert_allclose([f.log_likelihood for f in found], [e.log_likelihood for e in expected], rtol=1e-4)
    assert [f.is_greedy for f in found] == [e.is_greedy for e in expected]


@pytest.mark.full
@pytest.mark.draws(1)
@pytest.mark.parametrize("model", [LLAMA, GEMMA, ANSWERS])
def test_scores_are_those_of_a_plain_forward_pass(model, seed, rng):
    on = runtime_on(model, {})
    values = random_values(on, seed)
    context = rng.integers(0, VOCAB, 10).tolist()
    likeliest = Continuation(context, greedy_tokens(on, values, context, 2))
    almost = Continuation(context, [likeliest.tokens[0], (likeliest.tokens[1] + 1) % VOCAB])
    wanted = [*drawn(rng, (1, 1), (9, 3)), likeliest, almost]
    found = scores(Scorer(on, 64), values, wanted)
    check(found, [plain(on, values, one) for one in wanted])
    assert [one.is_greedy for one in found][2:] == [True, False]


def test_padding_does_not_choose_the_frequencies_of_longrope(seed, rng):
    original = 16
    scaling = LongRopeScaling(tuple(rng.uniform(1, 2, 4)), tuple(rng.uniform(4, 8, 4)), original, factor=4.0)
    on = runtime_on(replace(LLAMA, layers=1, rope=Rope(scaling=scaling)), {})
    values = random_values(on, seed)
    wanted = drawn(rng, (original - 3, 4), (original - 2, 4))  # of as many positions as are short, and of one more
    check(scores(Scorer(on, 64), values, wanted), [plain(on, values, one) for one in wanted])


LAYOUTS = [
    {"mesh": {"data": 4, "tensor": 2}, "zero": 3},
    {"mesh": {"data": 2, "tensor": 2}, "zero": 3, "rows": sequence_parallel()},
    {"mesh": {"context": 4}},
    {"mesh": {"pipe": 2}},
    {"mesh": {"data": 3}},
]


@pytest.mark.full
@pytest.mark.some(layout=LAYOUTS[1:4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout["mesh"]))
def test_scores_do_not_depend_on_the_layout(layout, seed, rng):
    alone, split = runtime_on(LLAMA, {}), runtime_on(LLAMA, layout)
    context = rng.integers(0, VOCAB, 7).tolist()
    values = random_values(alone, seed)
    wanted = [*drawn(rng, (8, 4), (1, 20)), Continuation(context, greedy_tokens(alone, values, context, 1))]
    check(scores(Scorer(split, 64), random_values(split, seed), wanted), scores(Scorer(alone, 64), values, wanted))


@pytest.mark.full
def test_few_lengths_compile_and_the_batch_is_of_one_size(seed, rng):
    on = runtime_on(LLAMA, {})
    values, scorer = random_values(on, seed), Scorer(on, SHORTEST + 20)
    wanted = drawn(rng, *((1 + number, 1) for number in range(2 * SEQUENCES + 3)), (SHORTEST, 1), (SHORTEST, 21))
    found = scores(scorer, values, wanted, greedy=False)
    assert len(found) == len(wanted)
    assert not any(one.is_greedy for one in found)
    assert scorer._compiled._cache_size() == 2


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (10, 8)])
def test_what_cannot_be_scored_is_refused(sizes, rng):
    scorer = Scorer(runtime_on(LLAMA, {}), 16)
    with pytest.raises(ValueError, match=f"a continuation of {sizes[1]} tokens after {sizes[0]}"):
        next(scorer({}, {}, drawn(rng, sizes)))
