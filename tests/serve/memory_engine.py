"""An engine that only remembers: which tokens' keys each slot of each page holds. The scheduler is tested under it."""

import random
from collections import deque
from dataclasses import dataclass

from axon.errors import UserError
from axon.serve.pages import PagePool
from axon.serve.request import Request, Sampling
from axon.serve.scheduler import Scheduler
from axon.serve.sequence import Sequence

VOCAB = 3
"""Few ids, so that prefixes are shared and drafts accepted by chance."""


class WatchedPool(PagePool):
    """A pool that remembers which pages must not be written: those that were registered since they were taken."""

    def __init__(self, *args):
        super().__init__(*args)
        self.frozen = set()

    def take(self, count):
        pages = super().take(count)
        self.frozen -= {*pages}
        return pages

    def register(self, page, digest):
        super().register(page, digest)
        self.frozen.add(page)


@dataclass
class Sizes:
    """Of an engine."""

    pages: int = 20
    size: int = 4
    windows: tuple = (None,)
    budget: int = 16
    max_running: int = 6
    max_rows: int = 10
    max_prefilling: int = 3


class MemoryEngine:
    """Runs plans over pages whose content is the tokens up to each position; steps are delivered late.

    Its model's text is random and known beforehand: `truth[number]`. Every claim about a step is asserted in `launch`.
    """

    def __init__(self, sizes: Sizes, seed: int, drafts: float = 0.3):
        self.sizes, self.rng, self.draft_rate = sizes, random.Random(seed), drafts
        self.pools = {window: WatchedPool(sizes.pages, sizes.size, window) for window in sizes.windows}
        self.scheduler = Scheduler(
            self.pools,
            budget=sizes.budget,
            max_running=sizes.max_running,
            max_rows_drawn=sizes.max_rows,
            max_prefilling=sizes.max_prefilling,
        )
        self.memory, self.truth, self.chains, self.live = {}, {}, {}, {}
        self.in_flight, self.scored = deque(), {}
        self.version = self.steps = self.count = self.reused = self.preempted = self.drafted = 0
        self.ended = []

    def submit(self, prompt, tokens, priority=0, scores=False, has_penalties=False, adapter=0):
        try:
            self.scheduler.check_fits(len(prompt), tokens)
        except UserError:
            return None
        sampling = Sampling(tokens=tokens, presence_penalty=1.0 if has_penalties else 0.0)
        request = Request(tuple(prompt), sampling, priority, prompt_logprobs=scores)
        self.count += 1
        sequence = Sequence(request, self.count, self.count, adapter=adapter)
        truth = [*prompt, *(self.rng.randrange(VOCAB) for _ in range(tokens))]
        self.truth[sequence.number], self.chains[sequence.number] = truth, chained(adapter, truth)
        self.live[sequence.number], self.scored[sequence.number] = sequence, 0
        self.scheduler.add(sequence)
        return sequence

    def swap(self):
        self.version += 1
        self.scheduler.new_weights()

    def cancel(self, number):
        sequence = self.scheduler.cancel(number)
        assert sequence is self.live.pop(number)
        assert sequence.finished

    def step(self):
        """Plan and launch one; deliver the oldest at random, at the latest when nothing else can be done."""
        for sequence in self.scheduler.running:
            if not sequence.pending and not sequence.drafts and self.rng.random() < self.draft_rate:
                at = len(sequence.tokens)
                guess = self.truth[sequence.number][at : at + self.rng.randrange(1, 5)]
                sequence.drafts = tuple(t if self.rng.random() < 0.8 else self.rng.randrange(VOCAB) for t in guess)
        waited = [s for s in self.scheduler.waiting if not s.pending]
        plan = self.scheduler.plan()
        self.launch(plan, waited)
        if not plan.scheduled or len(self.in_flight) > 2 or self.rng.random() < 0.5:
            self.deliver()
        self.steps += 1

    def deliver(self):
        if self.in_flight:
            for sequence, ids in self.in_flight.popleft():
                if not sequence.finished:
                    self.scheduler.accepted(sequence, ids)
                    truth = self.truth[sequence.number]
                    assert sequence.tokens == truth[: len(sequence.tokens)]
                    if len(sequence.tokens) == len(truth) or self.rng.random() < 0.02:
                        self.end(sequence)

    def end(self, sequence):
        if sequence.request.prompt_logprobs:
            assert self.scored[sequence.number] == sequence.prompt_length
        self.scheduler.finish(sequence)
        del self.live[sequence.number]
        self.ended.append(sequence.number)

    def launch(self, plan, waited):
        parts, scheduler = plan.scheduled, self.scheduler
        self.reused += sum(sequence.reused for sequence in plan.admitted)
        self.preempted += len(plan.preempted)
        assert sum(part.count for part in parts) <= self.sizes.budget
        assert sum(part.rows for part in parts) <= self.sizes.max_rows
        assert len(scheduler.running) <= self.sizes.max_running
        assert len({part.sequence.number for part in parts}) == len(parts)
        assert not {part.sequence.number for part in parts} & {sequence.number for sequence in plan.preempted}
        for sequence in plan.preempted:
            assert all(sequence.order > part.sequence.order for part in parts)
        self.check_turns(parts, waited)
        self.written = {}
        for part in parts:
            self.write(part)
        for part in parts:
            self.read(part)
        self.in_flight.append([(part.sequence, self.drawn(part)) for part in parts if part.draws])

    def check_turns(self, parts, waited):
        """The first that runs goes on, unless the host has to be waited for; if nothing runs, the first begins."""
        running = self.scheduler.running
        if running and (running[0] not in [part.sequence for part in parts]):
            assert running[0].pending
        assert running or not waited

    def write(self, part):
        sequence, size = part.sequence, self.sizes.size
        assert part.count > 0
        known = part.start + part.count - len(part.drafts)
        assert part.from_device == (known > len(sequence.tokens))
        assert not part.from_device or (part.count == 1 and not sequence.needs_host)
        assert (known == sequence.length - 1 and part.rows > len(part.drafts)) if part.draws else not part.drafts
        assert part.draws or known < sequence.length
        if sequence.request.prompt_logprobs and self.scored[sequence.number] < sequence.prompt_length:
            first = part.start + part.count - part.rows
            assert first <= self.scored[sequence.number] or part.rows == 0
            self.scored[sequence.number] = max(self.scored[sequence.number], min(known, sequence.prompt_length))
        for position, content in self.contents(part):
            for window, pages in sequence.pages.items():
                page, pool = pages[position // size], self.pools[window]
                assert 0 < page < pool.count
                assert pool.references(page) == 1, "a shared page is written"
                assert page not in pool.frozen, "a registered page is written"
                assert self.written.setdefault((window, page), sequence) is sequence, "two write one page"
                self.memory[window, page, position % size] = content, self.version

    def contents(self, part):
        """Position and what it holds, for each token of the step: the chain of all tokens up to it."""
        chain, known = self.chains[part.sequence.number], part.start + part.count - len(part.drafts)
        for position in range(part.start, known):
            yield position, chain[position]
        content = chain[known - 1]
        for position, draft in enumerate(part.drafts, known):
            content = hash((content, draft))
            yield position, content

    def read(self, part):
        sequence, size = part.sequence, self.sizes.size
        new = dict(self.contents(part))
        for window, pages in sequence.pages.items():
            first = 0 if window is None else max(0, part.start - window + 1)
            for position in range(first, part.start + part.count):
                content, version = self.memory[window, pages[position // size], position % size]
                assert content == new.get(position, self.chains[sequence.number][position])
                assert version >= sequence.version, "a prefix of old weights"

    def drawn(self, part):
        truth, known = self.truth[part.sequence.number], part.start + part.count - len(part.drafts)
        taken = 0
        while taken < len(part.drafts) and truth[known + taken] == part.drafts[taken]:
            taken += 1
        self.drafted += taken
        return truth[known : known + taken + 1]

    def check(self):
        for pool in self.pools.values():
            pool.check()
        for window, pool in self.pools.items():
            owned = [page for s in self.scheduler.running for page in s.pages[window] if page]
            assert all(pool.references(page) == owned.count(page) for page in {*owned})
            assert pool.used == len({*owned})
        assert {s.number for s in (*self.scheduler.running, *self.scheduler.waiting)} == self.live.keys()

    def drain(self):
        """All end, in so many steps as their tokens have one by one, a few times over for what is preempted."""
        bound = self.steps + 200 + 20 * sum(s.limit for s in self.live.values())
        while self.live:
            self.step()
            assert self.steps < bound, "some never end"
        self.check()
        assert all(pool.used == 0 for pool in self.pools.values())


def chained(adapter, tokens):
    chains, content = [], hash(adapter)
    for token in tokens:
        chains.append(content := hash((content, token)))
    return chains


def random_prompt(rng, longest):
    """Often one that begins as others do."""
    shared = [0, 1, 2, 1] * longest
    own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 10))]
    return [*shared[: rng.randrange(longest) if rng.random() < 0.7 else 0], *own][:longest]


def random_sizes(rng):
    running = rng.randrange(1, 8)
    return Sizes(
        pages=rng.randrange(3, 40),
        size=rng.choice((1, 2, 4, 5)),
        windows=rng.choice(((None,), (None, 6), (3,), (None, 1, 9), (None, 4))),
        budget=running + rng.randrange(24),
        max_running=running,
        max_rows=running + rng.randrange(8),
        max_prefilling=rng.randrange(1, 5),
    )


def random_operations(engine, count, longest=40):
    """Submit, step, cancel and swap weights at random."""
    rng = engine.rng
    for _ in range(count):
        chance = rng.random()
        if chance < 0.25 and len(engine.live) < 20:
            flags = {"scores": rng.random() < 0.1, "has_penalties": rng.random() < 0.2, "adapter": rng.randrange(3)}
            prompt = random_prompt(rng, longest)
            engine.submit(prompt, rng.randrange(1, 20), priority=rng.choice((0, 0, 1)), **flags)
        elif chance < 0.28 and engine.live:
            engine.cancel(rng.choice([*engine.live]))
        elif chance < 0.285:
            engine.swap()
        else:
            engine.step()
