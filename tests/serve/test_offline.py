"""Many requests whose answers are wanted in their order; and whatever model writes them."""

import dataclasses
import math
from itertools import islice

import jax
import pytest
from random_models import TIGHT, VOCAB, made

from axon.errors import UserError
from axon.layout import Layout, sequence_parallel, tensor_3d
from axon.runtime import Runtime
from axon.serve import Capacity, Engine, Finish, Request, Sampling, answers, offline
from axon.serve.offline import capacity_for, write
from axon.serve.text_model import check_writes
from axon.tune import TextClassifier
from models.bert import Bert
from models.gpt2 import GPT2
from models.llama import Llama
from models.t5 import T5

pytestmark = pytest.mark.usefixtures("caches")

LLAMA = Llama(VOCAB, 32, 1, 4, 2, 48)
T5_MODEL = T5(VOCAB, 32, 1, 2, heads=4, head_dim=8, mlp=48, buckets=8, max_distance=20, start_id=5)
MODELS = {"continues": LLAMA, "answers": T5_MODEL}


@pytest.fixture(scope="module")
def small(shared_seed):
    return made(LLAMA, shared_seed)


@pytest.fixture(scope="module")
def engine(small):
    """To be left idle."""
    return Engine(*small, capacity=TIGHT)


def requests_of(rng, count, **sampling):
    sizes = rng.integers(1, 20, (count, 2)).tolist()
    return [
        Request(tuple(rng.integers(0, VOCAB, size).tolist()), Sampling(tokens, seed=tokens, **sampling))
        for size, tokens in sizes
    ]


@pytest.mark.full
def test_answers_come_in_the_order_of_requests_each_as_the_engine_gives_it_alone(engine, rng, monkeypatch):
    monkeypatch.setattr(offline, "AHEAD", 4)
    requests = requests_of(rng, 9, logprobs=1)
    slow = dataclasses.replace(requests[0], sampling=Sampling(40, logprobs=1))

    def coming():
        for request in (slow, *requests):
            stats = engine.stats()
            assert stats.running + stats.waiting < 4
            yield request

    found = list(answers(engine, coming()))
    for request, answer in zip([slow, *requests], found, strict=True):
        updates = list(engine.stream(request))
        assert answer.ids == tuple(token for update in updates for token in update.ids)
        assert answer.logprobs == tuple(one for update in updates for one in update.logprobs)
        assert (answer.finish, len(answer.ids)) == (Finish.LENGTH, request.sampling.tokens)


def test_an_answer_is_there_before_requests_that_are_not_yet_asked_for(engine, rng):
    requests = requests_of(rng, 3)

    def coming():
        yield from requests
        raise LookupError("the next one is not there yet")

    with pytest.raises(LookupError):
        list(answers(engine, coming()))
    assert not [update for _ in range(9) for update in engine.step() if update.finish != Finish.CANCELLED]
    assert not engine.busy


def test_who_stops_reading_leaves_nothing_running(engine, rng):
    first = list(islice(answers(engine, requests_of(rng, 5)), 1))
    assert len(first) == 1
    while engine.busy:
        engine.step()
    assert not engine.stats().running + engine.stats().waiting
    assert engine.stats().free_pages == engine.stats().pages


def test_an_engine_is_as_large_as_its_requests_need(rng):
    continues, bounded, answering = (config.build() for config in (LLAMA, GPT2(VOCAB, 32, 1, 4, 48, 50), T5_MODEL))
    one = Request(tuple(rng.integers(0, VOCAB, rng.integers(2, 20)).tolist()), Sampling(int(rng.integers(1, 20))))
    assert capacity_for(continues, [one]) == Capacity(requests=1, length=128)
    assert capacity_for(bounded, [one] * 100) == Capacity(requests=64, length=50)
    longer = dataclasses.replace(one, sampling=Sampling(129 - len(one.prompt)))
    assert capacity_for(continues, [one, longer]) == Capacity(requests=2, length=256)
    assert capacity_for(answering, [one, longer]) == Capacity(requests=2, length=128)


LAYOUTS = {
    "zero": {"mesh": {"data": 4, "tensor": 2}, "zero": 3},
    "tensor": {"mesh": {"tensor": 2}},
    "sequence": {"mesh": {"data": 2, "tensor": 2}, "zero": 3, "rows": sequence_parallel()},
    "head_dim": {"mesh": {"tensor": 2}, "rows": {"heads": None, "kv_heads": None, "head_dim": "tensor"}},
    "3-d": {"mesh": {"z": 2, "x": 2, "y": 2}, **tensor_3d()},
}


@pytest.mark.full
@pytest.mark.some(model=("answers",), layout=("zero", "3-d"))
@pytest.mark.some(model=("continues",), layout=("tensor", "sequence"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_text_does_not_depend_on_the_layout(model, layout, seed, rng):
    asked = Request(tuple(rng.integers(0, VOCAB, 9).tolist()), Sampling(12, temperature=0.7, top_k=20, seed=seed))
    rows, config = LAYOUTS[layout], MODELS[model]
    mades = made(config, seed), made(config, seed, math.prod(rows["mesh"].values()), **rows)
    (one,), (split,) = (list(write(*parts, None, [asked])) for parts in mades)
    assert one.ids == split.ids


@pytest.mark.full
def test_a_text_may_have_as_many_tokens_as_there_are_positions_and_no_more(seed, rng):
    parts = made(GPT2(VOCAB, 32, 1, 4, 48, positions=70), seed)
    prompts = [tuple(rng.integers(0, VOCAB, length).tolist()) for length in (3, 60)]
    fitting = [Request(prompt, Sampling(70 - len(prompt), temperature=0)) for prompt in prompts]
    assert [len(answer.ids) for answer in write(*parts, None, fitting)] == [67, 10]
    for prompt in prompts:
        more = 71 - len(prompt)
        with pytest.raises(UserError, match=rf"a prompt of {len(prompt)} tokens and {more} more need 71 positions"):
            write(*parts, None, [*fitting, Request(prompt, Sampling(more))])


def test_what_cannot_be_written_is_refused_before_anything_runs(small):
    with pytest.raises(UserError, match=r"Sampling\.logit_bias has the id 64; this model's are from 0 to 63"):
        write(*small, None, [Request((1,), Sampling(logit_bias={64: 1.0}))])
    with pytest.raises(UserError, match="a BertModel cannot write a text: generation needs"):
        write(Runtime(Bert(64, 16, 1, 2, 24), Layout(), devices=jax.devices()[:1]), {}, {}, None, [Request((1,))])
    with pytest.raises(UserError, match=r"has classifier in the place of a head for tokens: .* cannot write a text"):
        check_writes(TextClassifier(GPT2(VOCAB, 32, 1, 4, 48, positions=70), ("a", "b")).build())
