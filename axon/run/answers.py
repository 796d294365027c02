"""Answers to held-out questions while a run is evaluated: how many are right, and what rewards say of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from axon.data import Prepared
from axon.data.prepared import Question
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.run.tree import Train
from axon.serve.offline import capacity_for
from axon.serve.request import Request, Sampling
from axon.train.state import State
from axon.train.step import Program
from axon.tune.episode_runner import EpisodeRunner, Start
from axon.tune.episodes import Episode
from axon.tune.judge import without_failed
from axon.tune.policy_engine import PolicyEngine
from axon.tune.policy_sampler import played
from axon.tune.prompt import Prompt
from axon.tune.prompts import of_question

SHOWN = 12
"""Answers of an evaluation that are kept in its event, with their questions: the first."""


def answers_of(
    train: Train, data: Prepared, program: Program, report: Callable[[str], None] = print
) -> "Answers | None":
    """The answers that `Evaluation.answers` asks for, None for none. Raises `UserError` for data without questions."""
    if train.evaluation is None or (count := train.evaluation.answers) is None:
        return None
    if not (questions := data.questions(count)) or data.tokenizer is None:
        raise UserError(
            f"Evaluation.answers is {count}, and Train.data, a {type(train.data).__name__}, has no held-out questions: "
            "set Train.data = @Chats() with Chats.held_out above 0, or Evaluation.answers to None"
        )
    return Answers(program, data, questions, report)


class Answers:
    """Asks held-out questions of a run's model as it is, by an engine on the run's devices."""

    def __init__(
        self, program: Program, data: Prepared, questions: Sequence[Question], report: Callable[[str], None] = print
    ):
        assert data.tokenizer is not None
        self._questions, self._tokenizer = questions, data.tokenizer
        self._runner: EpisodeRunner | None = data.runner(report)
        self._starts = [_start(of_question(one, data.tokenizer), len(one.answer), self._runner) for one in questions]
        requests = [_longest(start, self._runner) for start in self._starts]
        self._rewards = data.rewards(program.references, report)
        self._engine = PolicyEngine(program.runtime, None, data.tokenizer, capacity_for(program.module, requests))

    def __call__(self, state: State) -> "Answered":
        """What the state's model answers, by the greedy choice of each token."""
        questions, episodes = self._questions, played(self._engine, self._runner, state, self._starts)
        exact = [_last(episode) == one.answer for episode, one in zip(episodes, questions, strict=True)]
        if self._runner is not None:
            self._runner.close()
        rewards = self._rewards(questions, episodes)
        turns = {} if self._runner is None else {"turns": np.array([len(one.turns) for one in episodes], float)}
        return Answered(questions, episodes, self._tokenizer, {"exact": np.array(exact, float), **rewards, **turns})


def _start(prompt: Prompt, tokens: int, runner: EpisodeRunner | None) -> Start:
    """The greedy choice of each token, in a single answer of so many."""
    return Start(prompt, lambda turn: Sampling(tokens, temperature=0.0)) if runner is None else runner.greedy(prompt)


def _longest(start: Start, runner: EpisodeRunner | None) -> Request:
    """The longest request that an episode comes to."""
    ids = start.prompt.ids
    return Request(ids, start.sampling(0)) if runner is None else runner.longest(ids)


def _last(episode: Episode) -> tuple[int, ...]:
    """The ids of the last answer; none where the environment failed."""
    return () if episode.error is not None else episode.turns[-1].answer.ids


@dataclass(frozen=True)
class Answered:
    """Answers to questions.

    Args:
        tokenizer: of both.
        scores: `exact`, whether an answer, of an episode the last, is the right one, token by token; what each reward
            says of it: a number for each, NaN where one failed; and, with an environment, `turns`, the answers in an
            episode.
    """

    questions: Sequence[Question]
    episodes: Sequence[Episode]
    tokenizer: Tokenizer
    scores: Mapping[str, np.ndarray]

    def metrics(self) -> dict[str, float]:
        """The mean of each score, NaN left out."""
        return {name: float(values.mean()) for name, values in without_failed(self.scores).items()}

    def shown(self) -> list[dict[str, Any]]:
        """The first, as texts, with their scores: see `axon.observe.events`."""
        return [
            {
                "question": self.tokenizer.visible(question.prompt),
                "expected": self.tokenizer.visible(question.answer),
                "answer": episode.text,
                "scores": {name: float(values[row]) for name, values in self.scores.items()},
            }
            for row, (question, episode) in enumerate(zip(self.questions[:SHOWN], self.episodes, strict=False))
        ]
