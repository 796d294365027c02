"""Which keys a query sees, said declaratively, so that a kernel can skip what nobody sees."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from axon.errors import UserError

Documents = tuple[Array, Array] | None


@dataclass(frozen=True)
class Mask:
    """A rule that allows pairs of query and key; rules are joined by `&`."""

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, other)

    def keys(self, first: int, last: int, total: int) -> tuple[int, int]:
        """The half-open range of keys that some query in `[first, last)` may see, of `total`."""
        return 0, total

    def allowed(self, queries: Array, keys: Array, documents: Documents) -> Array | None:
        """Booleans that broadcast to `batch queries keys`; None if all are allowed.

        `queries` and `keys` are indices, of shapes `[queries, 1]` and `[1, keys]`; `documents` those of both, of
        shapes `[batch, queries, 1]` and `[batch, 1, keys]`.
        """
        return None

    def sees_all(self, first: int, last: int, start: int, stop: int) -> bool:
        """Whether every query in `[first, last)` surely sees every key in `[start, stop)`."""
        return False


@dataclass(frozen=True)
class Everything(Mask):
    """Every key."""

    def sees_all(self, first, last, start, stop):
        return True

    def __str__(self):
        return "unmasked"


@dataclass(frozen=True)
class Causal(Mask):
    """Keys no later than the query."""

    def keys(self, first, last, total):
        return 0, min(last, total)

    def allowed(self, queries, keys, documents):
        return keys <= queries

    def sees_all(self, first, last, start, stop):
        return stop <= first + 1

    def __str__(self):
        return "causal"


@dataclass(frozen=True)
class Window(Mask):
    """The `size` keys that end at the query, itself included (Mistral, arXiv:2310.06825)."""

    size: int

    def __post_init__(self):
        if self.size < 1:
            raise UserError(f"Window.size is {self.size}; a query sees at least itself, so write 1 or more")

    def keys(self, first, last, total):
        return max(0, min(first - self.size + 1, total)), total

    def allowed(self, queries, keys, documents):
        return queries - keys < self.size

    def sees_all(self, first, last, start, stop):
        return last - 1 - start < self.size

    def __str__(self):
        return f"window {self.size}"


@dataclass(frozen=True)
class SameDocument(Mask):
    """Keys of the query's own document, in rows that pack several; all, where no documents are given."""

    def allowed(self, queries, keys, documents):
        if documents is None:
            return None
        return documents[0] == documents[1]

    def __str__(self):
        return "same document"


@dataclass(frozen=True)
class Both(Mask):
    """What both rules allow."""

    one: Mask
    other: Mask

    def keys(self, first, last, total):
        (a, b), (c, d) = self.one.keys(first, last, total), self.other.keys(first, last, total)
        return max(a, c), min(b, d)

    def allowed(self, queries, keys, documents):
        parts = [m.allowed(queries, keys, documents) for m in (self.one, self.other)]
        parts = [p for p in parts if p is not None]
        return None if not parts else parts[0] if len(parts) == 1 else jnp.logical_and(*parts)

    def sees_all(self, first, last, start, stop):
        return self.one.sees_all(first, last, start, stop) and self.other.sees_all(first, last, start, stop)

    def __str__(self):
        return f"{self.one} & {self.other}"
