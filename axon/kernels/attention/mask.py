"""Which keys a query sees, declared, so that a kernel can skip keys that no query sees.

Every rule allows one interval of keys to a query, `[low, high)`, functions of the query's index that do not decrease;
a rule may also require the query's own document. The same holds for every `&` of rules: a dense mask is never needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.checks import check_range
from axon.errors import UserError

Documents = tuple[Array, Array] | None
"""The document of each query and of each key, `batch seq` and `batch kv_seq`."""


@dataclass(frozen=True)
class Mask:
    """A rule that allows pairs of query and key; rules are joined by `&`.

    `low` and `high` take the index of a query among the keys: a number, or an array of them.
    """

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, other)

    def low(self, query: Any) -> Any:
        """The first key that the query may see; None if there is no first."""
        return None

    def high(self, query: Any) -> Any:
        """One past the last key that the query may see; None if there is no last."""
        return None

    @property
    def by_document(self) -> bool:
        """Whether a query sees keys of its own document only."""
        return False

    def keys(self, first: Any, last: Any, total: int) -> tuple[Any, Any]:
        """The half-open range of keys that some query in `[first, last)` may see, of `total`; it may be empty."""
        low, high = self.low(first), self.high(last - 1)
        low = 0 if low is None else _clip(low, 0, total)
        return low, total if high is None else _larger(_smaller(high, total), low)

    def sees_all(self, first: Any, last: Any, start: Any, stop: Any) -> Any:
        """Whether the indices of queries `[first, last)` and keys `[start, stop)` allow every pair of them."""
        low, high = self.low(last - 1), self.high(first)
        return (True if low is None else low <= start) & (True if high is None else stop <= high)

    def allowed(self, queries: Array, keys: Array, documents: Documents) -> Array | None:
        """Booleans of the shape that the operands broadcast to; None if all are allowed.

        `queries` and `keys` are indices, as of shapes `[queries, 1]` and `[1, keys]`; `documents` those of both, as of
        shapes `[batch, queries, 1]` and `[batch, 1, keys]`.
        """
        low, high = self.low(queries), self.high(queries)
        parts = [None if low is None else keys >= low, None if high is None else keys < high]
        if self.by_document and documents is not None:
            parts.append(documents[0] == documents[1])
        parts = [part for part in parts if part is not None]
        return None if not parts else _all(iter(parts))


@dataclass(frozen=True)
class Everything(Mask):
    """Every key."""

    def __str__(self):
        return "unmasked"


@dataclass(frozen=True)
class Causal(Mask):
    """Keys no later than the query."""

    def high(self, query):
        return query + 1

    def __str__(self):
        return "causal"


@dataclass(frozen=True)
class Window(Mask):
    """The `size` keys that end at the query, itself included (Mistral, arXiv:2310.06825)."""

    size: int

    def __post_init__(self):
        check_range(self, "[1, inf)", "size")  # a query sees at least itself

    def low(self, query):
        return query - self.size + 1

    def __str__(self):
        return f"window {self.size}"


@dataclass(frozen=True)
class Prefix(Mask):
    """Keys no later than the query, or among the sequence's first `size` (prefix language models, arXiv:1910.10683)."""

    size: int

    def __post_init__(self):
        check_range(self, "[0, inf)", "size")

    def high(self, query):
        return _larger(query + 1, self.size)

    def __str__(self):
        return f"prefix {self.size}"


@dataclass(frozen=True)
class SameDocument(Mask):
    """Keys of the query's own document, in sequences that pack several; all, where there are no documents."""

    @property
    def by_document(self):
        return True

    def __str__(self):
        return "same document"


@dataclass(frozen=True)
class Both(Mask):
    """The keys that both rules allow."""

    one: Mask
    other: Mask

    def low(self, query):
        ends = [end for end in (self.one.low(query), self.other.low(query)) if end is not None]
        return None if not ends else ends[0] if len(ends) == 1 else _larger(*ends)

    def high(self, query):
        ends = [end for end in (self.one.high(query), self.other.high(query)) if end is not None]
        return None if not ends else ends[0] if len(ends) == 1 else _smaller(*ends)

    @property
    def by_document(self):
        return self.one.by_document or self.other.by_document

    def __str__(self):
        return f"{self.one} & {self.other}"


def causal_window(mask: Mask) -> int | None:
    """The window of a causal mask, None for none; `SameDocument` is ignored, as a cache has one document.

    Raises `UserError` for a mask that lets a query see beyond itself, or by another rule.
    """
    found = list(rules(mask))
    if not any(isinstance(rule, Causal) for rule in found) or any(isinstance(rule, Prefix) for rule in found):
        raise UserError(f"a KV cache supports causal masks only, as it grows token by token; this one is {mask}")
    return min((rule.size for rule in found if isinstance(rule, Window)), default=None)


def mean_keys(mask: Mask, seq: int) -> float:
    """How many keys a query sees, on average over the queries of a sequence of `seq` tokens that is one document.

    Causal masks see seq / 2: of a query's own key half is left out, as formulas of model FLOPs have it (PaLM,
    arXiv:2204.02311, appendix B). A window sees at most as many.
    """
    queries = np.arange(seq)
    low, high = mask.low(queries), mask.high(queries)
    low = np.zeros(seq) if low is None else np.maximum(low, 0)
    high = np.full(seq, seq) if high is None else np.minimum(high, seq)
    exact = float(np.sum(np.maximum(high - low, 0))) / seq
    return min(exact, seq / 2) if np.all(high <= queries + 1) else exact


def rules(mask: Mask) -> Iterator[Mask]:
    """The rules that a mask joins."""
    if isinstance(mask, Both):
        yield from rules(mask.one)
        yield from rules(mask.other)
    else:
        yield mask


def _all(parts: Iterator[Any]) -> Any:
    seen = next(parts)
    for part in parts:
        seen = jnp.logical_and(seen, part)
    return seen


def _larger(a: Any, b: Any) -> Any:
    return (jnp if _traced(a, b) else np).maximum(a, b)


def _smaller(a: Any, b: Any) -> Any:
    return (jnp if _traced(a, b) else np).minimum(a, b)


def _clip(a: Any, least: int, most: int) -> Any:
    return _smaller(_larger(a, least), most)


def _traced(*values: Any) -> bool:
    return any(isinstance(value, Array) for value in values)
