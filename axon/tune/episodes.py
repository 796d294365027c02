"""`Episode`, what follows a prompt: answers of a model, and what an environment says between them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from axon.serve.offline import Answer
from axon.serve.request import Finish, TokenLogprob
from axon.tune.prompt import Prompt
from axon.tune.rewards import Sampled

ENVIRONMENT = "environment"
"""The name of an environment's own reward."""


@dataclass(frozen=True)
class Turn:
    """An answer, and what the environment says to it, as a text and as the tokens that follow the answer's."""

    answer: Answer
    said: str = ""
    said_ids: tuple[int, ...] = ()

    def saved(self) -> dict[str, Any]:
        """The turn as JSON."""
        answer = self.answer
        logprobs = [one.logprob for one in answer.logprobs]
        own = {"ids": [*answer.ids], "text": answer.text, "finish": str(answer.finish), "logprobs": logprobs}
        return {**own, "said": self.said, "said_ids": [*self.said_ids]}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Turn":
        """The turn that `saved` wrote."""
        ids = tuple(saved["ids"])
        logprobs = tuple(map(TokenLogprob, ids, saved["logprobs"]))
        return cls(
            Answer(ids, saved["text"], Finish(saved["finish"]), logprobs), saved["said"], tuple(saved["said_ids"])
        )


@dataclass(frozen=True)
class Episode:
    """What follows a prompt.

    Args:
        turns: in their order. ended: whether model and environment ended it, and not the limit of tokens or turns.
        reward: what the environment says of the whole; NaN without one, and where it failed. error: how it failed.
        goes_on: whether another step samples more of it, also of its last answer.
    """

    turns: tuple[Turn, ...]
    ended: bool
    reward: float = math.nan
    error: Exception | None = None
    goes_on: bool = False

    @classmethod
    def of_answer(cls, answer: Answer, goes_on: bool = False) -> "Episode":
        """A single answer, without an environment."""
        return cls((Turn(answer),), answer.finish is Finish.STOP, goes_on=goes_on)

    def saved(self) -> dict[str, Any]:
        """The episode as JSON."""
        reward = None if math.isnan(self.reward) else self.reward
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        own = {"ended": self.ended, "reward": reward, "error": error, "goes_on": self.goes_on}
        return {"turns": [turn.saved() for turn in self.turns], **own}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Episode":
        """The episode that `saved` wrote."""
        reward = math.nan if saved["reward"] is None else saved["reward"]
        error = None if saved["error"] is None else RuntimeError(saved["error"])
        return cls(tuple(map(Turn.restored, saved["turns"])), saved["ended"], reward, error, saved["goes_on"])

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The tokens of all, those that the environment says included."""
        return tuple(token for turn in self.turns for token in (*turn.answer.ids, *turn.said_ids))

    @cached_property
    def sampled(self) -> np.ndarray:
        """A mask of `ids`, of those that the model sampled."""
        parts = [mask for turn in self.turns for mask in ([True] * len(turn.answer.ids), [False] * len(turn.said_ids))]
        return np.array([own for mask in parts for own in mask], bool)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens that the model sampled."""
        return [one for turn in self.turns for one in turn.answer.logprobs]

    @property
    def text(self) -> str:
        """What model and environment have said, one after the other."""
        return "\n".join(text for turn in self.turns for text in (turn.answer.text, turn.said) if text)

    def as_sampled(self, prompt: Prompt) -> Sampled:
        """The episode as rewards are given it."""
        texts = [text for turn in self.turns for text in (turn.answer.text, turn.said)]
        answer = self.turns[-1].answer.text if self.turns else ""
        ids = tuple(token for turn in self.turns for token in turn.answer.ids)
        about = prompt.reference, prompt.record, prompt.where
        return Sampled(prompt.text, answer, ids, self.ended, *about, tuple(texts[:-1]))


def metrics_of(episodes: Sequence[Episode]) -> dict[str, float]:
    """`environment_failed`: in how many episodes the environment failed; `rollout_turns`: the mean of the model's
    answers in the others; `rollout_cut`: the share of these that a limit ended."""
    whole = [episode for episode in episodes if episode.error is None]
    means = {
        "rollout_turns": np.mean([len(episode.turns) for episode in whole]),
        "rollout_cut": np.mean([not episode.ended for episode in whole]),
    }
    counts = {"environment_failed": float(len(episodes) - len(whole))}
    return counts | ({name: float(value) for name, value in means.items()} if whole else {})
