"""`Start`, where an episode begins or continues, and what its answers are then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from axon.data.tokenizer import Tokenizer
from axon.serve.detokenize import Detokenizer
from axon.serve.offline import Answer
from axon.serve.request import Finish, Request, Sampling
from axon.tune.episodes import Turn
from axon.tune.prompt import Prompt

EMPTY = Answer((), "", Finish.LENGTH)
"""An answer of which nothing is sampled yet."""


@dataclass(frozen=True)
class Start:
    """Where an episode begins, or continues.

    Args:
        prompt: of the episode. sampling: how its request `k` is drawn, `sampling(k)`.
        turns: what it has already; an answer of the last that has not ended continues. parts: in how many steps these
            were sampled. tokens: to sample now, at most; None: to the episode's end.
    """

    prompt: Prompt
    sampling: Callable[[int], Sampling]
    turns: tuple[Turn, ...] = ()
    parts: int = 0
    tokens: int | None = None

    def begun(self, turn: int) -> Answer:
        """What there is of an answer."""
        return self.turns[turn].answer if turn < len(self.turns) else EMPTY

    def drawn(self, turn: int) -> Sampling:
        """How a turn is drawn now: with noise of its own, also where it continues."""
        return self.sampling(turn + self.parts)

    def left(self, turns: Sequence[Turn]) -> int | None:
        """How many of `tokens` may still be sampled after so many turns."""
        if self.tokens is None:
            return None
        return self.tokens + _count(self.turns) - _count(turns) - len(self.begun(len(turns)).ids)

    def request(self, turns: Sequence[Turn], ids: tuple[int, ...], room: int | None = None) -> Request:
        """For the rest of the answer after these turns, which end in the tokens `ids`; `room`: tokens of an answer
        there, at most, besides what its sampling says."""
        begun, left, sampling = self.begun(len(turns)).ids, self.left(turns), self.drawn(len(turns))
        tokens = _most(sampling, room) - len(begun)
        tokens = tokens if left is None else min(tokens, left)
        return Request((*ids, *begun), sampling if tokens == sampling.tokens else replace(sampling, tokens=tokens))

    def joined(self, turn: int, ids: tuple[int, ...], answer: Answer, tokenizer: Tokenizer | None) -> Answer:
        """What there is of an answer after `ids`, with what was sampled now."""
        begun = self.begun(turn)
        if not begun.ids:
            return answer
        assert tokenizer is not None, "an answer that continues has a text"
        sampling = self.drawn(turn)
        stops = frozenset(sampling.stop_ids)
        text = Detokenizer(tokenizer, ids, ends=stops if sampling.ignore_eos else stops | tokenizer.ends)
        own = (*begun.ids, *answer.ids)
        logprobs = (*begun.logprobs, *answer.logprobs)
        return Answer(own, text.push(own) + text.finish(), answer.finish, logprobs, answer.error)

    def goes_on(self, turn: int, answer: Answer, room: int | None = None) -> bool:
        """Whether an answer is to continue in another step; `room`: as in `request`."""
        if self.tokens is None or answer.finish is not Finish.LENGTH:
            return False
        return len(answer.ids) < _most(self.drawn(turn), room)

    def check_said(self, turn: int, said: Any) -> None:
        """Raise `ValueError` where an environment says something else to an answer than it did before."""
        if self.begun(turn).finish is Finish.STOP and said != self.turns[turn].said:
            raise ValueError(
                f"step(state, answer) gives {said!r:.80} in a further step, and gave {self.turns[turn].said!r:.80} to "
                "the same answers: must depend on its arguments alone"
            )


def _most(sampling: Sampling, room: int | None) -> int:
    return sampling.tokens if room is None else min(sampling.tokens, room)


def _count(turns: Sequence[Turn]) -> int:
    return sum(len(turn.answer.ids) for turn in turns)
