"""Models with random weights and requests drawn at random, for tests of whatever serves them."""

from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from axon.kernels.sampling.draw import gumbel
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
MARGIN = 1e-5
"""By how much a token's last expert must score above the next for rounding not to change its choice."""


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


def likeliest_draws(runtime, values, variables, request, ids):
    """The id in place of each of `ids` that temperature, top-k and the request's own noise draw of the full forward
    pass's logits; that of `ids` where rounding may decide."""
    asked, first = request.sampling, len(request.prompt) - 1
    logits = full_forward_pass(runtime, values, variables, [*request.prompt, *ids])[first:-1]
    least_kept = np.sort(logits)[:, [-(asked.top_k or VOCAB)]]
    is_own = np.arange(VOCAB) == np.array(ids)[:, None]
    is_kept = logits > least_kept + np.where(is_own, -ROUNDING, ROUNDING)
    key = jax.random.wrap_key_data(np.array(divmod(asked.seed, 2**32), np.uint32), impl="threefry2x32")
    keys = jax.vmap(lambda place: jax.random.fold_in(key, place))(np.arange(len(ids)))
    noise = gumbel(jax.vmap(lambda key: jax.random.bits(key, (VOCAB,), jnp.uint32))(keys))
    return likeliest_of(np.where(is_kept, logits / asked.temperature + noise, -np.inf), ids)


def likeliest_of(logits, ids):
    """The likeliest id by each row of logits, or that of `ids` where it is as likely but for rounding or logits are
    no numbers."""
    own = np.take_along_axis(logits, np.array(ids)[:, None], axis=-1)[:, 0]
    is_less = own <= logits.max(axis=-1) - ROUNDING
    return np.where(is_less, logits.argmax(axis=-1), ids).tolist()


def full_forward_pass(runtime, values, variables, ids):
    """Logits of each of `ids`; no numbers from the first token on whose experts rounding may choose."""
    tokens = np.zeros((1, LONGEST), np.int32)
    tokens[0, : len(ids)] = ids
    forward, margins = forward_of(runtime)
    with runtime.tracing(), margins.measured():
        logits = np.array(forward(values, variables, tokens, len(ids)))[: len(ids)]
    logits[np.logical_or.accumulate(margins.are_close(len(ids)))] = np.nan
    return logits


TOP_K = lax.top_k


class RouterMargins:
    """By how much the last of each token's experts scores above the next, in each layer of what runs `measured`."""

    def __init__(self):
        self.found: list[np.ndarray] = []

    @contextmanager
    def measured(self):
        """Begin anew with what runs within, and was traced within."""
        self.found.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lax, "top_k", self._top_k)
            yield
        jax.effects_barrier()

    def are_close(self, length):
        """Of the first `length` tokens of one text, whether rounding may choose their experts."""
        found = np.zeros(length, bool)
        for margin in self.found:
            found |= margin[0].reshape(margin.shape[1], -1).min(axis=-1)[:length] < MARGIN
        return found

    def _top_k(self, scores, k):
        if k < scores.shape[-1]:
            best, _ = TOP_K(scores, k + 1)
            jax.debug.callback(lambda margin: self.found.append(np.array(margin)), best[..., -2] - best[..., -1])
        return TOP_K(scores, k)


@lru_cache(maxsize=2)
def forward_of(runtime):
    """Compiled: the logits of `tokens[1 seq]`, of which the first `length` are a text; and what it measures."""

    def forward(values, variables, tokens, length):
        model = runtime.bind(values, variables)
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden, *_ = model.hidden(Inputs(tokens, jnp.minimum(places, length - 1), jnp.zeros_like(tokens)))
        return model.output.logits(hidden)[0]

    return jax.jit(forward), RouterMargins()


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


def told(engine, requests):
    """Of each request its tokens with their log-probabilities, which show each bit of the logits."""
    numbers, found = [engine.submit(request) for request in requests], {}
    while engine.busy:
        for update in engine.step():
            found.setdefault(update.request, []).extend(update.logprobs)
    return [found[number] for number in numbers]
