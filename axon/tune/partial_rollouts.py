"""Partial rollouts: long answers continue in the next steps, by the weights of those."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.serve.detokenize import Detokenizer
from axon.serve.offline import Answer
from axon.serve.request import Finish, Sampling, TokenLogprob
from axon.train.state import State
from axon.tune.episode_runner import Start
from axon.tune.episodes import Episode
from axon.tune.policy_sampler import Noise, Player
from axon.tune.prompt import Prompt

WHOLE = ("min_tokens", "stop", "presence_penalty", "frequency_penalty")
"""Fields of `Sampling` that look at an answer from its beginning on."""


def check_partial(sampling: Sampling, partial: int) -> None:
    """Raise `UserError` for sampling that cannot be continued."""
    values, plain = vars(sampling), vars(Sampling())
    if partial and (whole := [name for name in WHOLE if values[name] != plain[name]]):
        raise UserError(
            f"Rollouts.partial is {partial}, and Sampling.{whole[0]} {values[whole[0]]!r}, which looks at an answer "
            "from its beginning: leave one of the two out"
        )


@dataclass
class PartialAnswer:
    """The tokens of an answer so far: `ids`, their log-probabilities where they are asked for, the step after which
    each was sampled, in how many `parts`, and why it ended; None: it has not."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    parts: int = 0
    finish: str | None = None

    def add(self, answer: Answer, version: int, tokens: int) -> None:
        """Go on with what was sampled; it has `tokens`, at most, in all."""
        self.ids += answer.ids
        self.logprobs += [one.logprob for one in answer.logprobs]
        self.versions += [version] * len(answer.ids)
        self.parts += 1
        if answer.finish is not Finish.LENGTH or len(self.ids) >= tokens:
            self.finish = str(answer.finish)


@dataclass(frozen=True)
class PartialBatch:
    """Batch `number`: prompts, and so many answers to each in a row."""

    number: int
    prompts: Sequence[Prompt]
    answers: Sequence[PartialAnswer]

    def saved(self) -> dict[str, Any]:
        """The answers as JSON."""
        return {"number": self.number, "answers": [vars(answer) for answer in self.answers]}

    @property
    def versions(self) -> np.ndarray:
        """Of all tokens, the steps after which they were sampled."""
        return np.array([version for answer in self.answers for version in answer.versions])


class PartialSampler:
    """Samples answers part by part.

    Args:
        player: samples. noise: how an answer is drawn. samples: answers to a prompt. most: tokens of an answer in a
            step, unless that trains on it.
    """

    def __init__(self, player: Player, noise: Noise, samples: int, most: int, tokenizer: Tokenizer):
        self._player, self._noise, self._samples, self._most = player, noise, samples, most
        self._tokenizer, self._tokens = tokenizer, noise.sampling.tokens

    def begun(self, number: int, prompts: Sequence[Prompt], saved: Sequence[dict[str, Any]] = ()) -> PartialBatch:
        """A batch without a token, or with those that `saved` has."""
        answers = [PartialAnswer(**one) for one in saved]
        return PartialBatch(number, prompts, answers or [PartialAnswer() for _ in range(self._samples * len(prompts))])

    def advance(self, state: State, batches: Iterable[PartialBatch], last: int) -> None:
        """Go on with all answers that have not ended by the state's weights: in batch `last` to their end."""
        open_ = [
            (batch, place) for batch in batches for place, answer in enumerate(batch.answers) if answer.finish is None
        ]
        starts = [self._start(batch, place, batch.number == last) for batch, place in open_]
        for (batch, place), episode in zip(open_, self._player.begin(state, starts)(), strict=True):
            batch.answers[place].add(episode.turns[0].answer, int(state.step), self._tokens)

    def _start(self, batch: PartialBatch, place: int, to_its_end: bool) -> Start:
        row, choice = divmod(place, self._samples)
        prompt, answer = batch.prompts[row], batch.answers[place]
        left = self._tokens - len(answer.ids)
        drawn = self._noise(batch.number, row, choice, answer.parts)
        own = replace(drawn, tokens=left if to_its_end else min(left, self._most))
        return Start(replace(prompt, ids=(*prompt.ids, *answer.ids)), partial(_same, own))

    def episodes(self, batch: PartialBatch) -> list[Episode]:
        """The episodes of a batch whose answers have ended."""
        return [
            Episode.of_answer(self._whole(batch.prompts[place // self._samples], answer))
            for place, answer in enumerate(batch.answers)
        ]

    def _whole(self, prompt: Prompt, answer: PartialAnswer) -> Answer:
        ids = tuple(answer.ids)
        own, stops = self._tokenizer, frozenset(self._noise.sampling.stop_ids)
        text = Detokenizer(own, prompt.ids, ends=stops if self._noise.sampling.ignore_eos else stops | own.ends)
        pairs = zip(ids, answer.logprobs, strict=True) if answer.logprobs else ()
        logprobs = tuple(TokenLogprob(token, logprob) for token, logprob in pairs)
        return Answer(ids, text.push(ids) + text.finish(), Finish(answer.finish), logprobs)


def _same(sampling: Sampling, turn: int) -> Sampling:
    return sampling
