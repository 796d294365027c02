"""Engines behind one front: each request is answered as by one engine, whichever it comes to."""

import jax
import numpy as np
import pytest

from axon.layout import Layout
from axon.runtime import Runtime
from axon.serve import Capacity, Engine, Replicas, Request, Sampling
from axon.serve.replicas import copied, shares
from axon.serve.request import Finish
from models.llama import Llama

MODEL = Llama(vocab=64, embed=16, layers=2, heads=2, kv_heads=2, mlp=24)
CAPACITY = Capacity(requests=2, tokens=16, length=64, page_size=4)


@pytest.fixture
def weights(seed):
    return Runtime(MODEL, Layout(), devices=jax.devices()[:1]).initialise(seed)


@pytest.fixture
def pair(weights):
    """Two engines, each on two devices."""
    whole = Runtime(MODEL, Layout(mesh={"data": 2, "tensor": 2}), devices=jax.devices()[:4])
    runtimes = [Runtime(MODEL, layout, devices=devices) for layout, devices in shares(whole)]
    return Replicas([Engine(runtime, *copied(runtime, *weights), capacity=CAPACITY) for runtime in runtimes])


def drawn_requests(rng, count):
    prompts = (tuple(rng.integers(0, 64, rng.integers(2, 30)).tolist()) for _ in range(count))
    return [Request(prompt, Sampling(int(rng.integers(1, 20)), seed=number)) for number, prompt in enumerate(prompts)]


def answers(engine, requests):
    """Ids of each request, in their order."""
    found = {engine.submit(request): [] for request in requests}
    while engine.busy:
        for update in engine.step():
            found[update.request] += update.ids
    return list(found.values())


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_mesh_is_cut_along_the_axes_that_split_no_weight(zero):
    devices = jax.devices()[:4]
    found = shares(Runtime(MODEL, Layout(mesh={"data": 2, "tensor": 2}, zero=zero), devices=devices))
    if zero == 3:
        assert found == [(Layout(mesh={"data": 2, "tensor": 2}, zero=3), devices)]
        return
    assert [own for _, own in found] == [devices[:2], devices[2:]]
    assert all(layout == Layout(mesh={"data": 1, "tensor": 2}, zero=zero) for layout, _ in found)


@pytest.mark.full
def test_all_are_answered_as_by_one_engine_and_each_engine_has_its_share(pair, weights, rng):
    requests = drawn_requests(rng, 9)
    one = Engine(Runtime(MODEL, Layout(), devices=jax.devices()[:1]), *weights, capacity=CAPACITY)
    assert answers(pair, requests) == answers(one, requests)
    each = [engine.stats() for engine in pair.engines]
    assert all(stats.generated_tokens > 0 for stats in each)
    assert pair.stats().generated_tokens == sum(stats.generated_tokens for stats in each)
    assert pair.stats().generated_tokens == one.stats().generated_tokens
    assert not pair._places
    assert not pair._numbers


@pytest.mark.full
def test_a_prompt_goes_where_its_beginning_is_known_unless_there_is_more_to_do(pair, rng):
    def begun():
        """Tokens of prompts that each engine has met."""
        return [engine.stats().prefix_queries for engine in pair.engines]

    known = tuple(rng.integers(0, 64, 24).tolist())
    answers(pair, drawn_requests(rng, 1))  # to the first, of those alike
    pair.engines[1].submit(Request(known, Sampling(1)))
    while pair.engines[1].busy:
        pair.engines[1].step()
    before = begun()
    answers(pair, [Request((*known, 7), Sampling(1))])
    assert np.subtract(begun(), before).tolist() == [0, 25]
    assert pair.stats().prefix_hits == 24
    before = begun()
    answers(pair, [Request((*known, token), Sampling(1)) for token in range(4)])
    assert np.subtract(begun(), before).tolist() == [50, 50]


@pytest.mark.slow
def test_a_cancelled_one_ends_and_the_others_go_on(pair, weights, rng):
    requests = [Request(request.prompt, Sampling(20, seed=3)) for request in drawn_requests(rng, 4)]
    numbers, found, ends = [pair.submit(request) for request in requests], {}, {}
    pair.cancel(numbers[1])
    pair.cancel(10**6)
    while pair.busy:
        for update in pair.step():
            found.setdefault(update.request, []).extend(update.ids)
            ends[update.request] = update.finish
    assert [ends[number] for number in numbers] == [Finish.LENGTH, Finish.CANCELLED, Finish.LENGTH, Finish.LENGTH]
    one = Engine(Runtime(MODEL, Layout(), devices=jax.devices()[:1]), *weights, capacity=CAPACITY)
    assert [found[numbers[place]] for place in (0, 2, 3)] == answers(one, [requests[place] for place in (0, 2, 3)])


@pytest.mark.full
def test_a_swap_is_of_all(pair, seed, rng):
    runtime, requests = Runtime(MODEL, Layout(), devices=jax.devices()[:1]), drawn_requests(rng, 4)
    others = runtime.initialise(seed + 1)
    answers(pair, requests)
    pair.swap(*others)
    assert answers(pair, requests) == answers(Engine(runtime, *others, capacity=CAPACITY), requests)
