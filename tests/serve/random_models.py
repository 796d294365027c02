"""Models with random weights and requests drawn at random, for tests of whatever serves them."""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from axon.layout import Execution, Layout
from axon.nn import Inputs
from axon.runtime import Runtime, nested
from axon.serve.capacity import Capacity
from axon.serve.request import Request, Sampling
from axon.serve.speculation import Drafts, NGram

VOCAB = 64
TIGHT = Capacity(requests=4, tokens=16, length=60, page_size=4, cache_tokens=72)
"""So few pages that requests are preempted, so few tokens a step that prompts come in chunks."""
ROUNDING = 1e-4
"""Of logits of these models, most of which are below 10: more than other orders of float32 sums make of them."""
LONGEST = 64
"""Tokens of a text, at most."""


def made(model, seed, devices=1, execution=Execution(), **layout):
    """A runtime, parameters and variables."""
    runtime = Runtime(model, Layout(**layout), execution=execution, devices=jax.devices()[:devices])
    return runtime, random_values(runtime, seed), runtime.initialise_variables(0)


def random_values(runtime, seed):
    """Parameters, the same for every layout, large enough that no two logits are nearly equal."""
    rng = np.random.default_rng(seed)

    def value(leaf):
        return jax.device_put(rng.normal(0, 0.4, leaf.shape).astype(np.float32), leaf.sharding)

    return nested(jax.tree.map(value, runtime.abstract(dict(runtime.parameters))))


def drawn_requests(rng, count, **sampling):
    """Some of which begin alike, so that they share pages."""
    common = rng.integers(0, VOCAB, 20).tolist()
    found = []
    for number in range(count):
        shared = common[: int(rng.integers(0, 20))] if number % 2 else []
        prompt = [*shared, *rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()]
        found.append(Request(tuple(prompt), Sampling(tokens=int(rng.integers(1, 20)), seed=number, **sampling)))
    return found


def ids_of(engine, requests):
    """The ids that follow each request, all asked at once."""
    return ids_and_ends(engine, requests)[0]


def ids_and_ends(engine, requests):
    """The ids that follow each request, all asked at once; and the last update of each."""
    numbers, ids, last = [engine.submit(request) for request in requests], {}, {}
    while engine.busy:
        for update in engine.step():
            assert update.request not in last
            ids.setdefault(update.request, []).extend(update.ids)
            if update.finish is not None:
                last[update.request] = update
    stats = engine.stats()
    assert stats.free_pages == stats.pages
    assert not stats.running + stats.waiting
    return [ids[number] for number in numbers], [last[number] for number in numbers]


def ids_of_any_order(engine, requests, rng):
    """Request and ids of each of those that were not cancelled: they come with random priorities, a few at a time."""
    waiting, running, ids, cancelled = list(requests), {}, {}, set()
    while waiting or engine.busy:
        for request in [waiting.pop() for _ in range(min(len(waiting), int(rng.integers(0, 4))))]:
            running[engine.submit(replace(request, priority=int(rng.integers(0, 3))))] = request
        if running and rng.random() < 0.05:
            cancelled.add(number := int(rng.choice([*running])))
            engine.cancel(number)
        for update in engine.step():
            ids.setdefault(update.request, []).extend(update.ids)
    stats = engine.stats()
    assert stats.free_pages == stats.pages
    return [(running[number], ids[number]) for number in running.keys() - cancelled]


def likeliest(runtime, values, variables, prompt, ids):
    """The likeliest id in place of each of `ids`, by one forward pass over all of them, without a cache."""
    logits = full_forward_pass(runtime, values, variables, [*prompt, *ids])
    return likeliest_of(logits[len(prompt) - 1 : -1], ids)


def likeliest_of(logits, ids):
    """The likeliest id by each row of logits; that of `ids` where it is as likely as another but for rounding."""
    own = np.take_along_axis(logits, np.array(ids)[:, None], axis=-1)[:, 0]
    return np.where(own > logits.max(axis=-1) - ROUNDING, ids, logits.argmax(axis=-1)).tolist()


def full_forward_pass(runtime, values, variables, ids):
    """Logits of each of `ids`."""
    tokens = np.zeros((1, LONGEST), np.int32)
    tokens[0, : len(ids)] = ids
    with runtime.tracing():
        return np.asarray(forward_of(runtime)(values, variables, tokens, len(ids)))[: len(ids)]


@lru_cache(maxsize=2)
def forward_of(runtime):
    """Compiled: the logits of `tokens[1 seq]`, of which the first `length` are a text."""

    def forward(values, variables, tokens, length):
        model = runtime.bind(values, variables)
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden, *_ = model.hidden(Inputs(tokens, jnp.minimum(places, length - 1), jnp.zeros_like(tokens)))
        return model.output.logits(hidden)[0]

    return jax.jit(forward)


REPEATS = NGram(longest=1, shortest=1, most=3)
"""Guesses after single tokens, which are often wrong."""


class HalfRight(Drafts):
    """A drafter that knows the texts, prompts included: of the tokens that follow it guesses every second one wrong."""

    most = 4

    def __init__(self, texts):
        self.texts = texts

    def start(self, target):
        return self

    def propose(self, wanted):
        return {number: self.guess(s.sequence.tokens, most) for number, (s, most) in wanted.items()}

    def guess(self, tokens, most):
        text = next(text for text in self.texts if text[: len(tokens)] == tokens)
        return [(token + place % 2) % VOCAB for place, token in enumerate(text[len(tokens) :][:most])]
