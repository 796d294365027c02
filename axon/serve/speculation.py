"""Guesses of the tokens that follow, of which a step of the engine verifies several at once.

A guess is verified by drawing its token as if there were none, with the same noise, and comparing (the Gumbel coupling
of Daliri, Musco and Suresh, arXiv:2408.07978): what is right comes sooner, and no token is another one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from axon.checks import check_range
from axon.errors import UserError
from axon.serve.runner import Runner
from axon.serve.stream import Stream

REMEMBERED = 2**13
"""Tokens of a request in which `NGram` looks, at least: those before twice as many are forgotten."""


class Drafts:
    """The guesses of one engine; by default none, by no program, and whatever becomes of them."""

    most = 0
    """How many tokens of a request are guessed at once, at most."""

    def propose(self, wanted: Mapping[int, tuple[Stream, int]]) -> Mapping[int, Sequence[int]]:
        """A request's number → ids that may follow its tokens, at most as many as are `wanted` of it; of one without a
        guess nothing. A request's tokens only ever get more."""
        return {}

    def verified(self, number: int, accepted: int) -> None:
        """The oldest step in flight that draws for a request drew for it; so many of its guesses were right."""

    def end(self, number: int) -> None:
        """Forget a request, perhaps one that nothing was wanted of."""

    def warm_up(self) -> None:
        """Compile all programs."""

    @property
    def compiles(self) -> int:
        """How many programs there are."""
        return 0


class Drafter(Protocol):
    """How an engine guesses: data, as a config names it."""

    @property
    def most(self) -> int:
        """How many tokens of a request are guessed at once, at most."""
        ...

    def start(self, target: Runner) -> Drafts:
        """The guesses of what `target` will draw."""
        ...


@dataclass(frozen=True)
class NGram:
    """What followed the last tokens when they last came, in prompt or text, may follow again (prompt look-up: Saxena,
    2023, github.com/apoorvumang/prompt-lookup-decoding). It needs no model, and is right where texts repeat, as
    summaries, edits of code and answers from documents do.

    Args:
        longest, shortest: how many last tokens are looked for; the longest that are found count. most: how many tokens
            are guessed at once.
    """

    longest: int = 4
    shortest: int = 2
    most: int = 4

    def __post_init__(self):
        check_range(self, "[1, 64]", "longest", "shortest", "most")
        if self.shortest > self.longest:
            raise UserError(f"NGram.shortest is {self.shortest}; must be at most NGram.longest, {self.longest}")

    def start(self, target: Runner) -> "LookUps":
        return LookUps(self)


class LookUps(Drafts):
    """The guesses of `NGram`, with an index of each request's tokens."""

    def __init__(self, ngram: NGram):
        self.most, self._ngram = ngram.most, ngram
        self._indices: dict[int, Index] = {}

    def propose(self, wanted: Mapping[int, tuple[Stream, int]]) -> dict[int, list[int]]:
        return {number: self._index(stream).propose(most) for number, (stream, most) in wanted.items()}

    def end(self, number: int) -> None:
        self._indices.pop(number, None)

    def _index(self, stream: Stream) -> "Index":
        number = stream.sequence.number
        if number not in self._indices:
            self._indices[number] = Index(stream.sequence.tokens, self._ngram)
        return self._indices[number]


class Index:
    """Where the last tokens of a request came before. It takes in each token once, in constant time.

    Args:
        tokens: of the request, which the caller appends to.
    """

    def __init__(self, tokens: Sequence[int], ngram: NGram):
        self._tokens, self._ngram = tokens, ngram
        self._known = max(0, len(tokens) - REMEMBERED)
        self._recent: dict[int, int] = {}
        """Hash of tokens → the place after them, the latest; a hash of others would only be a wrong guess."""
        self._older: dict[int, int] = {}
        self._most_entries = REMEMBERED * (ngram.longest - ngram.shortest + 1)

    def propose(self, most: int) -> list[int]:
        """At most so many ids that may follow; what is found repeats if it reaches the end."""
        tokens, end = self._tokens, len(self._tokens)
        self._learn()
        for size in range(min(self._ngram.longest, end), self._ngram.shortest - 1, -1):
            key = hash(tuple(tokens[end - size :]))
            if (place := self._recent.get(key) or self._older.get(key)) is not None:
                found = list(tokens[place : place + most])
                return (found * most)[:most]
        return []

    def _learn(self) -> None:
        tokens = self._tokens
        for place in range(self._known, len(tokens)):
            if len(self._recent) >= self._most_entries:
                self._older, self._recent = self._recent, {}
            for size in range(self._ngram.shortest, min(self._ngram.longest, place) + 1):
                self._recent[hash(tuple(tokens[place - size : place]))] = place
        self._known = len(tokens)
