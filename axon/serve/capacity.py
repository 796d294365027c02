"""How much an engine does at once, and what follows from that: sizes of steps, pools of pages."""

from collections.abc import Iterable
from dataclasses import dataclass

from axon.checks import check_range
from axon.errors import UserError, suggest
from axon.serve.batch import Size
from axon.serve.pages import PagePool
from axon.serve.text_model import TextModel

__all__ = ["Capacity"]

LENGTH = 4096
"""Positions of a request, where neither the model nor `Capacity.length` says how many."""

MOST_PAGES = 2**24
ROOM = "the tokens of a text (--length; --tokens of generate), --requests, or --cache-tokens"
"""What says how much the cache holds."""

CACHE_DTYPES = ("int8", "float8_e4m3fn", "bfloat16", "float32")

SMALLEST, GROWTH = 16, 4
"""Tokens of the smallest step, and how many times as many the next one has."""

MOST_ROWS = 128
"""Rows of logits of a step, at most, if no more requests run."""


@dataclass(frozen=True)
class Capacity:
    """How much an engine does at once.

    Args:
        requests: that run at once. tokens: of a step, at most. length: tokens of a request with its text; by default as
            many as the model has positions; of an encoder–decoder so many are read, and as many written.
        page_size: tokens a page; by default 16 on a CPU and 128 elsewhere.
        cache_tokens: for how many there are pages; by default for all requests at half the `length`. cache_dtype: of
            keys and values, by default the compute dtype; int8 and float8_e4m3fn have a scale a token and head.
        snapshots: of states at borders of pages, by which prefixes are shared, of a model whose blocks keep any; by
            default as many as `requests`.
    """

    requests: int = 64
    tokens: int = 256
    length: int | None = None
    page_size: int | None = None
    cache_tokens: int | None = None
    cache_dtype: str | None = None
    snapshots: int | None = None

    def __post_init__(self):
        check_range(self, "[1, 2**16]", "requests", "tokens", "page_size", "snapshots")
        check_range(self, "[2, 2**40]", "length", "cache_tokens")
        if self.tokens < self.requests:
            raise UserError(
                f"Capacity.tokens is {self.tokens}; must be at least Capacity.requests, {self.requests}, as each "
                "request that runs has a token in a step"
            )
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_DTYPES:
            hint = suggest(self.cache_dtype, CACHE_DTYPES)
            raise UserError(f"Capacity.cache_dtype is {self.cache_dtype!r}; must be one of {CACHE_DTYPES}.{hint}")

    def length_of(self, module: TextModel) -> int:
        """Tokens of a request with its text. Raises `UserError` for more than the model has positions."""
        most = module.max_length
        if self.length is not None and most is not None and self.length > most:
            raise UserError(
                f"Capacity.length is {self.length}, and this model has {most} positions; must be at most that"
            )
        return self.length or most or LENGTH

    def sizes(self) -> list[Size]:
        """Of steps: a power of `GROWTH` times `SMALLEST` tokens, and as many as there may be at most."""
        tokens = [SMALLEST]
        while tokens[-1] < self.tokens:
            tokens.append(tokens[-1] * GROWTH)
        tokens[-1] = max(SMALLEST, -(-self.tokens // SMALLEST) * SMALLEST)
        most = -(-max(MOST_ROWS, self.requests) // SMALLEST) * SMALLEST
        return [Size(count, min(count, most)) for count in tokens]

    @property
    def num_snapshots(self) -> int:
        """How many snapshots of states there are, if a model has states."""
        return self.snapshots or self.requests

    def page_size_on(self, platform: str) -> int:
        """Tokens a page on a platform: `cpu`, `gpu` or `tpu`."""
        return self.page_size or (16 if platform == "cpu" else 128)

    def pools(self, windows: Iterable[int | None], page_size: int, length: int) -> dict[int | None, PagePool]:
        """A pool for each window, with pages for the same requests, each of up to `length` tokens.

        Raises `UserError` for a cache in which not one such request has room, and for one beyond all memory."""
        if self.cache_tokens is not None and self.cache_tokens < length:
            raise UserError(
                f"Capacity.cache_tokens is {self.cache_tokens:,}; must be at least Capacity.length, the {length:,} "
                "tokens that one request may have: raise it (--cache-tokens), or lower that (--length)"
            )
        tokens = self.cache_tokens or max(length, self.requests * length // 2)
        found = {}
        for window in windows:
            # What a request has at once of a window: it, and what a step adds.
            share = 1.0 if window is None else min(1.0, (window + self.tokens + page_size) / length)
            count = -(-round(tokens * share) // page_size)
            if count > MOST_PAGES:
                pages = f"{count:,} pages of {page_size} tokens"
                raise UserError(f"the cache would have {pages}; must be at most {MOST_PAGES:,}: lower {ROOM}")
            found[window] = PagePool(1 + count, page_size, window)
        return found
