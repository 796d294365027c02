"""A request while it is answered: how its tokens are drawn, and what becomes of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.serve.detokenize import Detokenizer
from axon.serve.policy import Policy, Row
from axon.serve.request import Finish, Grammar, TokenLogprob, Update
from axon.serve.sampler import SampleOutput
from axon.serve.scheduler import Scheduled
from axon.serve.sequence import Sequence as Running

NO_TOKEN = "the model's logits are not numbers here, or its grammar allows no token"


class Stream:
    """The memory of a request besides its pages.

    Args:
        sequence: its own. vocab: ids that the model predicts. tokenizer: makes texts of ids, and says which ids end
            them; None: neither.
    """

    def __init__(self, sequence: Running, vocab: int, tokenizer: Tokenizer | None):
        self.sequence, self.request = sequence, sequence.request
        sampling, prompt, grammar = self.request.sampling, self.request.prompt, self.request.grammar
        own = frozenset() if tokenizer is None or sampling.ignore_eos else tokenizer.ends
        self._ends = own | frozenset(sampling.stop_ids)
        self._no_end = _bits_without(self._ends, vocab) if sampling.min_tokens else None
        self._text = None
        if tokenizer is not None:
            self._text = Detokenizer(tokenizer, prompt, sampling.stop, self._ends, sampling.min_tokens)
        self._policy = Policy(sampling, prompt, vocab)
        self._grammar = None if grammar is None else grammar.copy()
        self._failure: str | None = None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._is_first = True

    def use_drafts(self, drafts: Sequence[int]) -> None:
        """Have guesses of the tokens that follow verified, as far as the grammar allows them."""
        if self._grammar is not None:
            allowed = 0
            with self._guarding():
                allowed = self._grammar.copy().accept(drafts)
            drafts = drafts[:allowed]
        self.sequence.drafts = tuple(drafts)

    def row_after(self, drafts: Sequence[int], place: int) -> Row:
        """How the token at `place` is drawn, which follows these guesses. They may lack the last ones where neither a
        grammar nor penalties need to know them."""
        grammar = None
        with self._guarding():
            if self._grammar is not None:
                grammar = self._grammar.copy()
                grammar.accept(drafts)
            return self._row(place, drafts, grammar)
        return self._row(place, drafts, None)

    def _row(self, place: int, drafts: Sequence[int], grammar: Grammar | None) -> Row:
        position = place - len(self.request.prompt)
        mask = self._no_end if position < self.request.sampling.min_tokens else None
        return Row(self._policy, position, drafts, mask if grammar is None else grammar.allowed())

    def rows(self, part: Scheduled) -> list[Row]:
        """How tokens are drawn from the last `part.rows` of a step's; of a prompt's they are given."""
        if self._grammar is not None:
            with self._guarding():
                return self._rows(part, self._grammar.copy())
        return self._rows(part, None)

    def _rows(self, part: Scheduled, grammar: Grammar | None) -> list[Row]:
        prompt, drafts, rows = self.request.prompt, part.drafts, []
        after = part.start + part.count - part.rows + 1
        for place in range(after, after + part.rows):
            known = len(drafts) - (after + part.rows - 1 - place)
            if place < len(prompt):
                rows.append(Row(self._policy, place - len(prompt), scored_token=prompt[place]))
                continue
            if grammar is not None and known > 0:
                grammar.accept(drafts[known - 1 : known])
            rows.append(self._row(place, drafts[: max(0, known)], grammar))
        return rows

    def accepted(self, part: Scheduled, drawn: SampleOutput, first: int) -> list[int]:
        """The tokens that a step drew, from its row `first` on: the drafts that are what was drawn, and one more."""
        last = first + part.rows - 1
        ids = drawn.ids[last - len(part.drafts) : last + 1]
        right = next((place for place, draft in enumerate(part.drafts) if ids[place] != draft), len(part.drafts))
        return ids[: right + 1]

    def update(self, part: Scheduled, ids: Sequence[int], drawn: SampleOutput, first: int) -> Update | None:
        """What there is to tell after a step; `ids`: of `accepted`; none, if it did not come to the prompt's end."""
        scored = part.rows - (1 + len(part.drafts) if part.draws else 0)
        for row in range(first, first + scored):
            token = self.request.prompt[len(self._prompt_logprobs) + 1]
            self._prompt_logprobs.append(self._logprob(drawn, row, token, drawn.scored_logprobs))
        return self._make_update(ids, drawn, first + scored) if part.draws else None

    def ended(self, finish: Finish, error: str | None = None) -> Update:
        """The last update of a request that ends before its text does."""
        return Update(self.sequence.number, finish=finish, error=error)

    def _make_update(self, ids: Sequence[int], drawn: SampleOutput, row: int) -> Update:
        taken, text, logprobs, finish = [], "", [], None
        for token in ids:
            if not drawn.valid[row + len(taken)]:
                self._failure = self._failure or NO_TOKEN
            if self._failure is not None:
                finish = Finish.FAILED
                break
            if self.request.sampling.logprobs is not None:
                logprobs.append(self._logprob(drawn, row + len(taken), token, drawn.logprobs))
            taken.append(token)
            text += "" if self._text is None else self._text.push([token])
            if (finish := self._finish(token, len(taken) - len(ids))) is not None:
                break
        if finish is not None and self._text is not None:
            text += self._text.finish()
        self._policy.add(taken)
        first, self._is_first = self._is_first, False
        return Update(
            self.sequence.number,
            tuple(taken),
            text,
            tuple(logprobs),
            tuple(self._prompt_logprobs) if first else (),
            finish,
            self._failure if finish is Finish.FAILED else None,
            self.sequence.reused if first else 0,
        )

    def _finish(self, token: int, after: int) -> Finish | None:
        """Why a request ends with `token`; `after`: how many of those drawn with it come before the last, negative."""
        by_text = self._text is not None and self._text.stopped
        if token in self._ends or by_text or (self._grammar is not None and self._grammar_ends(self._grammar, token)):
            return Finish.STOP
        if self._failure is not None:
            return Finish.FAILED
        return Finish.LENGTH if len(self.sequence.tokens) + after >= self.sequence.limit else None

    def _grammar_ends(self, grammar: Grammar, token: int) -> bool:
        with self._guarding():
            grammar.accept([token])
            return grammar.ended
        return False

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """What a grammar raises ends its own request, with the next update, and no other's."""
        try:
            yield
        except Exception as error:  # a grammar is the caller's, and may raise anything
            said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._failure = f"its grammar failed: {said}"

    def _logprob(self, drawn: SampleOutput, row: int, token: int, of: Sequence[float]) -> TokenLogprob:
        most = self.request.sampling.logprobs or 0
        top = zip(drawn.top_ids[row][:most].tolist(), drawn.top_logprobs[row][:most].tolist(), strict=True)
        return TokenLogprob(token, float(of[row]), tuple(top))


def _bits_without(ids: frozenset[int], vocab: int) -> np.ndarray:
    """All ids of a model but these, as `Grammar.allowed` gives them."""
    allowed = np.arange(-(-vocab // 32) * 32) < vocab
    allowed[[token for token in ids if 0 <= token < vocab]] = False
    return np.packbits(allowed, bitorder="little").view(np.uint32)
