"""An engine's speculation: for which requests it guesses, and what comes of it."""

from collections.abc import Iterable

from axon.serve.sequence import Sequence
from axon.serve.speculation import Drafts
from axon.serve.stream import Stream

WORTH = 0.25
"""Tokens that a step has to get right, on average, for a request to be guessed for."""
RECENT = 8
"""Steps over which that is averaged, about."""
REST, LONGEST_REST = 32, 512
"""Tokens for which a request is left alone at first, and at most: twice as many each time that it is of no use."""


class DraftController:
    """Whether one request is worth guessing for."""

    def __init__(self):
        self._right, self._rest, self._wakes = 1.0, REST, 0

    def is_awake(self, length: int) -> bool:
        """Whether to guess what follows so many tokens."""
        return length >= self._wakes

    def verified(self, accepted: int, length: int) -> None:
        """So many guesses were right, and there are now `length` tokens."""
        self._right += (accepted - self._right) / RECENT
        if self._right < WORTH:
            self._wakes, self._right = length + self._rest, 2 * WORTH
            self._rest = min(2 * self._rest, LONGEST_REST)
        elif self._right > 2 * WORTH:
            self._rest = REST


class Drafting:
    """Guesses for the requests of an engine: `drafts` says what, their `DraftController` for whom.

    Attributes:
        drafted: tokens that were guessed and verified. accepted: those of them that were right.
    """

    def __init__(self, drafts: Drafts):
        self._drafts, self.drafted, self.accepted = drafts, 0, 0
        self._controllers: dict[int, DraftController] = {}

    @property
    def compiles(self) -> int:
        return self._drafts.compiles

    def warm_up(self) -> None:
        """Compile all programs."""
        self._drafts.warm_up()

    def begin(self, sequence: Sequence) -> None:
        """A new one, for which there may be guesses from now on."""
        if self._drafts.most:
            self._controllers[sequence.number], sequence.drafting = DraftController(), True

    def propose(self, running: Iterable[tuple[Stream, int | None]]) -> None:
        """Guess for those that decode, and of which the last token is known. Streams, each with the position at which
        and after which there must be no guess."""
        if not self._drafts.most:
            return
        wanted = {}
        for stream, until in running:
            sequence, tokens = stream.sequence, len(stream.sequence.tokens)
            sequence.drafting = self._controllers[sequence.number].is_awake(tokens)
            last = sequence.limit - 1 if until is None else min(sequence.limit - 1, until)
            most = min(self._drafts.most, last - tokens)
            if sequence.drafting and not sequence.pending and sequence.remaining == 1 and most > 0:
                wanted[sequence.number] = stream, most
        for number, ids in self._drafts.propose(wanted).items() if wanted else ():
            stream, most = wanted[number]
            stream.use_drafts(ids[:most])

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A step drew for it: so many guesses were verified, and so many right."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self._drafts.verified(sequence.number, accepted)
        if sequence.drafting:
            self._controllers[sequence.number].verified(accepted, len(sequence.tokens))

    def end(self, sequence: Sequence) -> None:
        """Forget a request that has ended."""
        self._controllers.pop(sequence.number, None)
        self._drafts.end(sequence.number)
