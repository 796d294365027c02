"""A request's state on the host: its tokens, how many of them are cached, and in which pages."""

from collections.abc import Iterable

from axon.serve.pages import page_hash, root
from axon.serve.request import Request


class Sequence:
    """What the scheduler and the engine know of a request.

    Args:
        request: what was asked. number: its own. arrival: its place among requests of the same priority.
        limit: how many tokens prompt and text may have; by default as many as were asked for. source: ids that an
            encoder reads before. adapter: the number of its own, see `axon.serve.adapters`; 0: none. variant: what
            else, besides its tokens and the weights, keys and values depend on.

    Attributes:
        tokens: prompt and text, as far as the host knows them. prompt_length: of the prompt alone.
        pending: how many more steps in flight have drawn.
        cached: tokens whose keys and values are in pages once the launched steps are done, `verifying` drafts included,
            of which the host does not know yet whether they are accepted.
        drafts: guesses of the tokens that follow, to be verified by the next step that reaches the end of `tokens`.
        drafting: whether what follows is guessed, for which the host must know all tokens.
        reused: tokens that were in the cache when it was last admitted.
        scored: of how many of the prompt's tokens a row was drawn, for `Request.prompt_logprobs`.
        pages: window of a group (None: full attention) → pages in order; 0 where one before the window was released.
            first: window → index of the first that was not.
        hashes: of its full pages; registered: how many of them pools know. version: of the weights that it was admitted
            with.
        state_version: how many of the drafts of its last step were accepted: which of its states counts.
        snapshot: the place of that of its prefix, until the step is launched that begins with it.
        finished: it has no pages and gets none.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        arrival: float,
        limit: int | None = None,
        source: tuple[int, ...] = (),
        adapter: int = 0,
        variant: str = "",
    ):
        self.request, self.number, self.arrival = request, number, arrival
        self.source, self.adapter, self.variant = source, adapter, variant
        self.limit = len(request.prompt) + request.sampling.tokens if limit is None else limit
        self.tokens, self.prompt_length = list(request.prompt), len(request.prompt)
        self.pending = self.cached = self.verifying = self.reused = self.scored = self.registered = 0
        self.drafts: tuple[int, ...] = ()
        self.drafting = False
        self._has_penalties = request.grammar is not None or request.sampling.has_penalties
        self.pages: dict[int | None, list[int]] = {}
        self.first: dict[int | None, int] = {}
        self.hashes: list[bytes] = []
        self.version = -1
        self.state_version = 0
        self.snapshot: int | None = None
        self.finished = False

    @property
    def order(self) -> tuple[int, float, int]:
        """The smaller is served first."""
        return -self.request.priority, self.arrival, self.number

    @property
    def length(self) -> int:
        """Tokens that are drawn, whether or not the host knows them."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens that are drawn and not cached: 1 of one that decodes, more of one that prefills."""
        return len(self.tokens) + self.pending - self.cached

    @property
    def committed(self) -> int:
        """Tokens that are cached for good: without drafts in flight."""
        return self.cached - self.verifying

    @property
    def needs_host(self) -> bool:
        """Whether the host must know all tokens before the next one is drawn: a grammar's, penalties', guesses'."""
        return self._has_penalties or self.drafting

    @property
    def is_ready(self) -> bool:
        """Whether its next step may be planned now."""
        waits = self.verifying or (self.pending and self.needs_host)
        return not waits and self.length < self.limit

    @property
    def scores(self) -> bool:
        """Whether rows of its prompt are still to be drawn for `Request.prompt_logprobs`."""
        return self.request.prompt_logprobs and self.scored < self.prompt_length

    @property
    def usable_drafts(self) -> int:
        """How many of its drafts can be of use before its limit."""
        return 0 if self.pending else min(len(self.drafts), self.limit - self.length - 1)

    def rows(self, count: int) -> int:
        """How many of the next `count` tokens are drawn from: the last ones."""
        if self.scores:
            return max(0, self.cached + count - max(self.cached, self.scored))
        return max(0, count - self.remaining + 1)

    def advance(self, count: int) -> tuple[int, ...]:
        """A step with the next `count` tokens is launched; those past its end are drafts, which it returns."""
        past = count - self.remaining
        self.cached, self.state_version = self.cached + count, 0
        self.scored = max(self.scored, min(self.cached, self.prompt_length))
        if past < 0:
            return ()
        drafts = self.drafts[:past]
        self.pending, self.verifying, self.drafts = self.pending + 1, len(drafts), ()
        return drafts

    def accept(self, ids: Iterable[int]) -> None:
        """The oldest step in flight drew these: the drafts that it accepted and one more."""
        ids = list(ids)
        self.tokens += ids
        self.pending -= 1
        if self.verifying:
            self.state_version = len(ids) - 1
            self.cached -= self.verifying - (len(ids) - 1)
            self.verifying = 0

    def restart(self) -> None:
        """Nothing of it is cached any more, and what steps in flight draw still counts."""
        self.cached = self.verifying = self.registered = self.state_version = 0
        self.pages, self.first = {}, {}

    def become(self, variant: str) -> None:
        """What is cached from now on, from the first token on, is of this variant."""
        self.variant = variant
        self.hashes.clear()

    def use_weights(self, version: int) -> None:
        """What is cached from now on, from the first token on, is of these weights."""
        if version != self.version:
            self.version = version
            self.hashes.clear()

    def hash_pages(self, size: int) -> list[bytes]:
        """Of all pages that are full of tokens known on the host; each is computed once."""
        for page in range(len(self.hashes), len(self.tokens) // size):
            previous = self.hashes[-1] if page else root(self.version, self.adapter, self.variant)
            self.hashes.append(page_hash(previous, self.tokens[page * size : (page + 1) * size]))
        return self.hashes
