"""Thousands of random requests: none takes what is another's, leaves something behind, or goes without an end."""

import ctypes
import gc
import sys
from collections import Counter

import jax
import numpy as np
import pytest

from axon.layout import Layout
from axon.runtime import Runtime, nested
from axon.serve.capacity import Capacity
from axon.serve.drafting import Drafting
from axon.serve.engine import Engine
from axon.serve.request import Finish, Request, Sampling
from axon.serve.speculation import Drafts
from axon.serve.stream import NO_TOKEN
from models.olmo import Olmo

VOCAB, RESERVED, LENGTH = 64, 63, 60
MODEL = Olmo(VOCAB, 16, 2, 2, 1, 24, window=6, local_layers=1)
"""Layers of two groups: with a window, and without."""
TIGHT = Capacity(requests=8, tokens=32, length=LENGTH, page_size=4, cache_tokens=120)
ROOMY = Capacity(requests=8, tokens=32, length=LENGTH, page_size=4, cache_tokens=800)
VERSIONS = 3


class Walk:
    """A grammar: after each number of tokens others are allowed. It ends, or raises something."""

    def __init__(self, seed, end, fails=False):
        self.seed, self.end, self.fails, self.count = seed, end, fails, 0

    def allowed(self):
        if self.fails and self.count == self.end:
            raise RuntimeError("this grammar is broken")
        return np.random.default_rng((self.seed, self.count)).integers(1, 2**32, 2, dtype=np.uint32)

    def accept(self, ids):
        for number, token in enumerate(ids):
            if self.ended or not int(self.allowed()[token // 32]) >> token % 32 & 1:
                return number
            self.count += 1
        return len(ids)

    def copy(self):
        other = Walk(self.seed, self.end, self.fails)
        other.count = self.count
        return other

    @property
    def ended(self):
        return not self.fails and self.count >= self.end


class Guesses(Drafts):
    """A drafter that is right now and then: it guesses among few tokens."""

    most = 4

    def __init__(self, rng):
        self.rng = rng

    def propose(self, wanted):
        guesses = {}
        for number, (stream, most) in wanted.items():
            guesses[number] = self.rng.choice(stream.sequence.tokens[-8:], self.rng.integers(0, most + 1)).tolist()
        return guesses


class Traffic:
    """Random requests to an engine, and what came of each: nothing of those that have ended but a sample."""

    def __init__(self, engine, weights, rng):
        self.engine, self.weights, self.rng, self.sampled = engine, weights, rng, 0.0
        self.prefixes = [rng.integers(0, RESERVED, 30).tolist() for _ in range(4)]
        self.open, self.gone, self.submitted = {}, set(), 0
        self.swap()
        self.finishes, self.errors, self.kept = Counter(), set(), []

    def run(self, count, sampled=0.0):
        """So many more requests, to their ends; of this fraction of them the answers are kept."""
        self.sampled = sampled
        goal = self.submitted + count
        while self.submitted < goal or self.engine.busy:
            if self.submitted < goal:
                self.act()
            self.take(self.engine.step())
            if not self.rng.integers(50):
                self.check()
        self.take(self.engine.step())
        assert not self.open
        self.gone.clear()

    def act(self, within=False):
        """Something that may happen between two steps."""
        while len(self.open) < 20 and self.rng.integers(3):
            self.submit()
        if self.open and not self.rng.integers(20):
            self.engine.cancel(int(self.rng.choice([*self.open])))
        if not self.rng.integers(200):
            self.swap()
        if not within and not self.rng.integers(40):
            self.read()

    def submit(self):
        request = self.draw()
        self.follow(self.engine.submit(request), request)

    def follow(self, number, request):
        self.submitted += 1
        is_sampled = self.rng.random() < self.sampled and not (request.grammar and request.grammar.fails)
        self.open[number] = Followed(request, self.version, is_sampled)

    def swap(self):
        self.version = int(self.rng.integers(VERSIONS))
        self.engine.swap(self.weights[self.version])
        for followed in self.open.values():
            followed.version = None

    def read(self):
        """A stream, whose reader may leave."""
        request, number, last = self.draw(), None, None
        stream = self.engine.stream(request)
        for update in stream:
            if number is None:
                number = update.request
                self.follow(number, request)
            self.take([update])
            last = update
            if not self.rng.integers(8):
                break
            self.act(within=True)
        stream.close()
        if last is not None and last.finish is None:
            del self.open[number]
            self.gone.add(number)

    def take(self, updates):
        for update in updates:
            assert update.request not in self.gone
            followed = self.open[update.request]  # one that ended, or whose reader left, has no more
            followed.take(update)
            if update.finish is not None:
                del self.open[update.request]
                self.finishes[update.finish] += 1
                self.errors.add(update.error)
                if followed.is_sampled and followed.version is not None and update.finish is not Finish.CANCELLED:
                    self.kept.append(followed)

    def draw(self):
        rng = self.rng
        shared = self.prefixes[rng.integers(4)][: int(rng.integers(30))] if rng.integers(2) else []
        prompt = [*shared, *rng.integers(0, RESERVED, int(rng.integers(1, 25))).tolist()]
        if not rng.integers(30):
            prompt[rng.integers(len(prompt))] = RESERVED
        end, seed = int(rng.integers(1, 12)), int(rng.integers(2**31))
        grammar = Walk(seed, end, fails=not rng.integers(5)) if not rng.integers(5) else None
        return Request(
            tuple(prompt), drawn_sampling(rng), int(rng.integers(3)), grammar, prompt_logprobs=not rng.integers(6)
        )

    def check(self):
        """Every page is used by those who say so, and by no one else."""
        for window, pool in self.engine._runner.pools.items():
            pool.check()
            running = self.engine._scheduler.running
            used = Counter(page for sequence in running for page in sequence.pages[window] if page)
            assert {page: pool.references(page) for page in used} == used
            assert len(used) == pool.used


class Followed:
    """A request, and what it was answered."""

    def __init__(self, request, version, is_sampled):
        self.request, self.version, self.is_sampled = request, version, is_sampled
        self.count, self.is_first, self.last, self.logprobs = 0, True, None, []

    def take(self, update):
        request, self.last = self.request, update
        self.count += len(update.ids)
        assert self.count <= min(request.sampling.tokens, LENGTH - len(request.prompt))
        assert all(0 <= token < VOCAB for token in update.ids)
        if request.sampling.logprobs is not None:
            assert [one.token for one in update.logprobs] == [*update.ids]
        if request.prompt_logprobs and self.is_first and update.finish is not Finish.CANCELLED:
            assert [one.token for one in update.prompt_logprobs] == [*request.prompt[1:]]
        assert (update.error is not None) == (update.finish is Finish.FAILED)
        self.is_first = False
        if self.is_sampled:
            self.logprobs += [(one.token, one.logprob) for one in update.logprobs] or update.ids

    @property
    def answer(self):
        return self.logprobs, self.last.finish


def drawn_sampling(rng):
    """Plain, or with everything that can be asked."""
    tokens, seed = int(rng.integers(1, 25)), int(rng.integers(2**63))
    temperature = float(rng.choice([0, 0.7, 1.3]))
    if rng.integers(3):
        return Sampling(tokens, temperature, seed=seed, logprobs=None if rng.integers(2) else 0)
    return Sampling(
        tokens, temperature, int(rng.integers(1, VOCAB)), 0.9, 0.01, seed,
        repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: 1.0}, logprobs=int(rng.integers(5)),
        stop_ids=(int(rng.integers(VOCAB)),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def weights(shared_seed):
    """A runtime, and its parameters in three versions, whose reserved token has no numbers for an embedding."""
    runtime, rng = Runtime(MODEL, Layout(), devices=jax.devices()[:1]), np.random.default_rng(shared_seed)
    shapes = {path: leaf.shape for path, leaf in runtime.abstract(dict(runtime.parameters)).items()}

    def values():
        drawn = {path: rng.normal(0, 0.4, shape).astype(np.float32) for path, shape in shapes.items()}
        drawn["embedding/table"][RESERVED] = np.nan
        return nested(jax.tree.map(jax.device_put, drawn))

    return runtime, [values() for _ in range(VERSIONS)]


@pytest.fixture(scope="module")
def served(weights):
    """An engine with few pages, compiled."""
    runtime, [first, *_] = weights
    engine = Engine(runtime, first, capacity=TIGHT)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def alone(weights):
    """One for a request after the other."""
    runtime, [first, *_] = weights
    return Engine(runtime, first, capacity=ROOMY)


@pytest.fixture(params=["plain", "drafts"])
def traffic(request, served, weights, rng):
    served._drafting = Drafting(Guesses(rng) if request.param == "drafts" else Drafts())
    return Traffic(served, weights[1], rng)


def check_nothing_is_left(engine):
    assert not engine._streams
    assert not engine._flights
    assert not engine._runner._batches._taken
    assert sorted(engine._runner._batches._free) == list(range(TIGHT.requests))
    assert not engine._scheduler.running + engine._scheduler.waiting
    for pool in engine._runner.pools.values():
        pool.check()
        assert not pool.used


def check_alone(alone, weights, kept):
    """Each of those kept gets the same answer of an engine that has nothing else to do, and remembers nothing."""
    for followed in kept:
        alone.swap(weights[1][followed.version])
        again, number = Followed(followed.request, followed.version, True), alone.submit(followed.request)
        while alone.busy:
            for update in alone.step():
                assert update.request == number
                again.take(update)
        assert again.answer == followed.answer


def check_all_happened(traffic):
    """Every way to end was gone, and pages were short."""
    stats = traffic.engine.stats()
    assert set(traffic.finishes) == set(Finish)
    assert traffic.errors == {None, NO_TOKEN, "its grammar failed: RuntimeError: this grammar is broken"}
    assert stats.preemptions
    assert stats.prefix_hits
    assert traffic.finishes.total() < traffic.submitted  # the rest were streams whose readers left


@pytest.mark.full
@pytest.mark.few(traffic=("plain",))
def test_of_a_few_hundred_random_requests_nothing_is_left(traffic, alone, weights):
    compiles = traffic.engine.stats().compiles
    traffic.run(150, sampled=0.2)
    check_nothing_is_left(traffic.engine)
    assert traffic.engine.stats().compiles == compiles
    check_alone(alone, weights, traffic.kept)


@pytest.mark.slow
def test_ten_thousand_random_requests_leave_no_page_no_memory_and_no_program_behind(traffic, alone, weights):
    compiles = traffic.engine.stats().compiles
    traffic.run(2_000, sampled=0.03)
    before = memory()
    traffic.run(8_000)
    blocks, resident = (now - then for now, then in zip(memory(), before, strict=True))
    check_nothing_is_left(traffic.engine)
    assert blocks < 5_000
    assert resident < 2**24
    assert traffic.engine.stats().compiles == compiles
    check_all_happened(traffic)
    assert len(traffic.kept) > 20
    check_alone(alone, weights, traffic.kept)


def memory():
    """Blocks of Python's allocator, and the bytes of the process, without what the C library keeps free."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
    with open("/proc/self/statm") as file:
        return sys.getallocatedblocks(), int(file.read().split()[1]) * 4096
