"""Pages of keys and values: who uses each, which are free, and what is still known of a free one."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

PADDING = 0
"""The page that padding is written to; no sequence's."""


def root(version: int, adapter: int = 0, variant: str = "") -> bytes:
    """What a chain of `page_hash` begins with: keys and values depend on the weights, the adapter and the variant."""
    return hashlib.blake2b(repr((version, adapter, variant)).encode(), digest_size=32).digest()


def page_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Of a page's tokens and all before them: a digest, so that different prefixes never have the same."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=32).digest()


class PagePool:
    """Pages 1 to `count` − 1, of `size` tokens each, of the layers with one `window` (None: full attention).

    A page is used by as many sequences as there are references to it. One that nobody uses is free, and what it holds
    stays known by its hash until it is taken again: those of which nothing is known first, then the one that was used
    the longest ago.
    """

    def __init__(self, count: int, size: int, window: int | None = None):
        self.count, self.size, self.window = count, size, window
        self._references = [0] * count
        self._hashes: list[bytes | None] = [None] * count
        self._pages: dict[bytes, int] = {}
        self._blank = list(range(count - 1, PADDING, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free and known, the least recently used first."""

    @property
    def free(self) -> int:
        """How many pages can be taken, cached ones included."""
        return len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        """How many pages sequences have."""
        return self.count - 1 - self.free

    @property
    def cached(self) -> int:
        """How many free pages are still known."""
        return len(self._cached)

    def references(self, page: int) -> int:
        """How many sequences use the page."""
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """So many pages with one reference each. Raises `ValueError`, and takes nothing, if fewer are `free`."""
        if count > self.free:
            raise ValueError(f"{count} pages are asked for, and {self.free} are free")
        pages = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """One reference more to a page that is used, or known."""
        if not self._references[page]:
            del self._cached[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One reference less."""
        assert self._references[page] > 0, f"page {page} is released and nobody uses it"
        self._references[page] -= 1
        if self._references[page]:
            return
        if self._hashes[page] is None:
            self._blank.append(page)
        else:
            self._cached[page] = None

    def known(self, digest: bytes) -> int | None:
        """The page that holds what `page_hash` gave this digest for."""
        return self._pages.get(digest)

    def register(self, page: int, digest: bytes) -> None:
        """From now on the used page is `known`, unless another with the same content is already."""
        assert self._references[page] > 0, f"page {page} is registered and nobody uses it"
        assert self._hashes[page] in (None, digest), f"page {page} is registered with another content"
        if self._pages.setdefault(digest, page) == page:
            self._hashes[page] = digest

    def forget_all(self) -> None:
        """No page is known any more; those in use stay so."""
        self._pages.clear()
        self._hashes = [None] * self.count
        self._blank.extend(self._cached)
        self._cached.clear()

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.size)

    def first_page(self, position: int) -> int:
        """Index, in its sequence, of the first page that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.size

    def least(self, tokens: int) -> int:
        """How many pages a sequence of so many tokens has to have at once, if it goes token by token."""
        pages = self.pages_for(tokens)
        return pages if self.window is None else min(pages, (self.window - 2) // self.size + 2)

    def check(self) -> None:
        """Raise `AssertionError` where a page is lost, in two places, or known and not what it is known for."""
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free), "a page is free twice"
        unused = {page for page in range(1, self.count) if not self._references[page]}
        assert set(free) == unused, f"free pages {sorted(free)}; without a reference are {sorted(unused)}"
        assert min(self._references) >= 0, "a page has fewer than no references"
        assert not self._references[PADDING], "padding's page is used"
        known = {page: digest for page, digest in enumerate(self._hashes) if digest is not None}
        assert {page: digest for digest, page in self._pages.items()} == known, "a page and its hash disagree"
        assert set(self._cached) == unused & known.keys(), "what is known and free is not what is cached"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        digest, self._hashes[page] = self._hashes[page], None
        assert digest is not None
        del self._pages[digest]
        return page
