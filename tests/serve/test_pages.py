"""Pages: references, and the prefix cache."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from axon.serve.pages import PagePool, page_hash, root


def test_a_page_is_known_by_all_tokens_up_to_its_end_the_weights_and_the_adapter(rng):
    tokens = rng.integers(0, 2**31, 8).tolist()
    other = [*tokens[:3], tokens[3] + 1, *tokens[4:]]
    second = page_hash(page_hash(root(1), tokens[:4]), tokens[4:])
    assert second == page_hash(page_hash(root(1), tokens[:4]), tokens[4:])
    assert second != page_hash(page_hash(root(1), other[:4]), other[4:])
    assert second != page_hash(page_hash(root(2), tokens[:4]), tokens[4:])
    assert second != page_hash(page_hash(root(1, 2), tokens[:4]), tokens[4:])
    assert second != page_hash(page_hash(root(1, 0, "a"), tokens[:4]), tokens[4:])
    assert page_hash(root(1), tokens[4:]) != second


def test_what_is_known_is_taken_last_and_the_least_recently_used_first():
    pool = PagePool(6, 4)
    pages = pool.take(5)
    for page in pages[:4]:
        pool.register(page, bytes([page]))
    for page in (pages[2], pages[0], pages[4], pages[1], pages[3]):
        pool.release(page)
    assert (pool.free, pool.used, pool.cached) == (5, 0, 4)
    pool.share(pages[2])
    pool.release(pages[2])  # used again: now it is the most recent one
    assert [pool.take(1)[0] for _ in range(5)] == [pages[4], pages[0], pages[1], pages[3], pages[2]]
    assert all(pool.known(bytes([page])) is None for page in pages)


def test_more_pages_than_are_free_are_refused_and_none_is_taken():
    pool = PagePool(4, 4)
    with pytest.raises(ValueError, match="4 pages are asked for, and 3 are free"):
        pool.take(4)
    assert pool.free == 3


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_window_needs_as_many_pages_at_once_as_a_query_sees_at_worst(window, size):
    pool = PagePool(2, size, window)
    for tokens in range(1, 30):
        seen = [position // size - pool.first_page(position) + 1 for position in range(tokens)]
        assert max(seen) <= pool.least(tokens)
    assert max(seen) == pool.least(tokens)


class Pool(RuleBasedStateMachine):
    """A pool beside a model of it: owners of pages, and what each page holds."""

    @initialize(count=st.integers(1, 12))
    def begin(self, count):
        self.pool, self.owners, self.holds = PagePool(count, 4), [], {}

    @rule(count=st.integers(0, 5))
    def take(self, count):
        if count > self.pool.free:
            return
        cached = {page for page, digest in self.holds.items() if self.pool.known(digest) == page} - {*self.owners}
        pages = self.pool.take(count)
        assert not {*pages} & {*self.owners}
        assert 0 not in pages
        blank = self.pool.count - 1 - len({*self.owners}) - len(cached)
        assert len(cached & {*pages}) == max(0, count - blank)
        self.owners += pages
        self.holds = {page: digest for page, digest in self.holds.items() if page not in pages}

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), content=st.binary(min_size=1, max_size=1))
    def register(self, data, content):
        page = data.draw(st.sampled_from(self.owners))
        if page not in self.holds:
            first = self.pool.known(content) is None
            self.pool.register(page, content)
            if first:
                self.holds[page] = content

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data):
        page = data.draw(st.sampled_from(sorted(self.holds)))
        assert self.pool.known(self.holds[page]) == page
        self.pool.share(page)
        self.owners.append(page)

    @rule()
    def forget(self):
        self.pool.forget_all()
        assert all(self.pool.known(digest) is None for digest in self.holds.values())
        self.holds = {}

    @invariant()
    def none_is_lost_or_double_owned(self):
        self.pool.check()
        assert self.pool.used == len({*self.owners})
        assert self.pool.used + self.pool.free == self.pool.count - 1
        assert all(self.pool.references(page) == self.owners.count(page) for page in range(self.pool.count))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=25, stateful_step_count=30)
