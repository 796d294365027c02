"""The pages of a sequence in every group of layers: taken, shared with others of the same prefix, and released.

A step that is launched later runs later on the device. So a page may be released, and taken by another sequence for the
next step, while steps in flight still read it.
"""

from collections.abc import Iterable, Mapping

from axon.errors import UserError
from axon.serve.pages import PADDING, PagePool
from axon.serve.sequence import Sequence
from axon.serve.snapshots import Snapshots


class BlockTables:
    """`pools`: window (None: full attention) → the pool of the layers with it, all with pages of the same size.
    `snapshots`: of the states that a sequence has besides, without which known pages are of no use; None: there are
    none."""

    def __init__(self, pools: Mapping[int | None, PagePool], snapshots: Snapshots | None = None):
        self.pools, self.snapshots = dict(pools), snapshots
        self.size = next(iter(self.pools.values())).size
        self._windowed = [(window, pool) for window, pool in self.pools.items() if window is not None]
        assert all(pool.size == self.size and pool.window == window for window, pool in self.pools.items())

    def check_fits(self, prompt: int, tokens: int) -> None:
        """Raise `UserError` for a request whose pages the pools could not hold even if it were alone."""
        total = prompt + tokens - 1  # the last token is drawn and never cached
        for pool in self.pools.values():
            if (pages := pool.least(total)) > pool.count - 1:
                room = (pool.count - 1) * pool.size
                raise UserError(
                    f"a prompt of {prompt} tokens and {tokens} more need {pages} pages of {pool.size} tokens, and "
                    f"the cache has {pool.count - 1}, for {room + 1} tokens in all; shorten the prompt, ask for fewer "
                    "tokens, or give the engine more pages"
                )

    def fit(self, tokens: int) -> bool:
        """Whether the pools could hold so many tokens of a sequence that is alone."""
        return all(pool.least(tokens) < pool.count for pool in self.pools.values())

    def prefix(self, sequence: Sequence) -> int:
        """How many of its first tokens are in known pages: whole pages, and never its last token.

        Of full attention all of these pages, of a window those that the first query after them sees; and where there
        are states, with a snapshot of these after the pages.
        """
        if sequence.scores:
            return 0
        hashes, best = sequence.hash_pages(self.size), 0
        unbroken = dict.fromkeys(self.pools, 0)
        for index in range((sequence.length - 1) // self.size):
            for window, pool in self.pools.items():
                unbroken[window] = 0 if pool.known(hashes[index]) is None else unbroken[window] + 1
            if None in unbroken and not unbroken[None]:
                break
            end = index + 1
            if self.snapshots is not None and not self.snapshots.known(hashes[index]):
                continue
            if all(n >= end - self.pools[w].first_page(end * self.size) for w, n in unbroken.items()):
                best = end
        return best * self.size

    def is_coming(self, sequence: Sequence, prefix: int, running: Iterable[Sequence]) -> bool:
        """Whether one that runs will soon have cached the page after the prefix: then it is worth waiting for."""
        index = prefix // self.size
        if sequence.scores or (index + 1) * self.size >= sequence.length:
            return False
        digest = sequence.hashes[index]
        return any(
            other.committed < (index + 1) * self.size and other.hashes[index : index + 1] == [digest]
            for other in running
        )

    def needs(self, sequence: Sequence) -> dict[int | None, int]:
        """Pages that it still has to take, by group, for the tokens it has and a page of those it will draw."""
        return {
            window: self._need(pool, sequence, len(sequence.pages[window]), sequence.first[window])
            for window, pool in self.pools.items()
        }

    def costs(self, sequence: Sequence, prefix: int) -> dict[int | None, int]:
        """Free pages, by group, that one would use which begins with the known pages of its prefix."""
        end = prefix // self.size
        costs = {}
        for window, pool in self.pools.items():
            first = pool.first_page(prefix)
            unused = sum(not pool.references(page) for page in self._shared(pool, sequence, first, end))
            costs[window] = unused + self._need(pool, sequence, end, first)
        return costs

    def begin(self, sequence: Sequence, prefix: int) -> None:
        """Give it the known pages of its prefix, and the snapshot after them."""
        end = prefix // self.size
        if self.snapshots is not None and end:
            sequence.snapshot = self.snapshots.hold(sequence.hashes[end - 1])
        for window, pool in self.pools.items():
            first = pool.first_page(prefix)
            shared = self._shared(pool, sequence, first, end)
            for page in shared:
                pool.share(page)
            sequence.pages[window], sequence.first[window] = [PADDING] * first + shared, first
        sequence.cached = sequence.reused = prefix
        sequence.registered = end

    def settle(self, sequence: Sequence, *, register: bool) -> None:
        """Make its full pages known, if `register`, and release those that no query of it will see again."""
        committed = sequence.committed
        full = min(committed, len(sequence.tokens)) // self.size
        if register and full > sequence.registered:
            self._register(sequence, full)
        for window, pool in self._windowed:
            first, old = pool.first_page(committed), sequence.first[window]
            if first > old:
                self._release(pool, sequence.pages[window], range(old, first))
                sequence.first[window] = first

    def room(self, sequence: Sequence) -> int:
        """How many tokens more its pages and all free ones hold."""
        pages = [len(sequence.pages[window]) + pool.free for window, pool in self.pools.items()]
        return min(pages) * self.size - sequence.cached

    def extend(self, sequence: Sequence, count: int) -> None:
        """Take the pages for its next `count` tokens, at most `room`."""
        end = -(-(sequence.cached + count) // self.size)
        for window, pages in sequence.pages.items():
            if end > len(pages):
                pages += self.pools[window].take(end - len(pages))

    def release(self, sequence: Sequence) -> None:
        """Release all its pages, the last first: the longer a prefix stays known, the better."""
        self.drop_snapshot(sequence)
        for window, pool in self.pools.items():
            pages = sequence.pages[window]
            self._release(pool, pages, reversed(range(sequence.first[window], len(pages))))
        sequence.restart()

    def drop_snapshot(self, sequence: Sequence) -> None:
        """A sequence waits no more for the snapshot of its prefix, if it did."""
        if self.snapshots is not None and sequence.snapshot is not None:
            self.snapshots.release(sequence.snapshot)
            sequence.snapshot = None

    def to_border(self, sequence: Sequence, count: int) -> int:
        """So many tokens of a step, or as many as end at the last border of a page among them, if there are states: of
        these there is a snapshot only where a step ends."""
        more = (sequence.cached + count) // self.size * self.size - sequence.cached
        return count if self.snapshots is None or more <= 0 else more

    def _register(self, sequence: Sequence, full: int) -> None:
        hashes = sequence.hash_pages(self.size)
        for window, pool in self.pools.items():
            for index in range(max(sequence.registered, sequence.first[window]), full):
                pool.register(sequence.pages[window][index], hashes[index])
        sequence.registered = full

    def _release(self, pool: PagePool, pages: list[int], indices: Iterable[int]) -> None:
        for index in indices:
            pool.release(pages[index])
            pages[index] = PADDING

    def _need(self, pool: PagePool, sequence: Sequence, end: int, first: int) -> int:
        goal = min(sequence.length + self.size, sequence.limit - 1)
        more = pool.pages_for(goal) - end
        return max(0, more if pool.window is None else min(more, pool.least(goal) - (end - first)))

    def _shared(self, pool: PagePool, sequence: Sequence, first: int, end: int) -> list[int]:
        pages = [pool.known(digest) for digest in sequence.hashes[first:end]]
        return [page for page in pages if page is not None]
