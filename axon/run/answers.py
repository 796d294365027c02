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
from axon.serve.offline import Answer, capacity_for
from axon.serve.request import Request, Sampling
from axon.train.state import State
from axon.train.step import Program
from axon.tune.policy_engine import PolicyEngine
from axon.tune.rewards import without_failed

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
        self._data, self._questions, self._report, self._tokenizer = data, questions, report, data.tokenizer
        self._requests = [Request(one.prompt, Sampling(tokens=len(one.answer), temperature=0.0)) for one in questions]
        capacity = capacity_for(program.module, self._requests)
        self._engine = PolicyEngine(program.runtime, None, data.tokenizer, capacity)

    def __call__(self, state: State) -> "Answered":
        """What the state's model answers, by the greedy choice of each token."""
        found = self._engine.answers(state, self._requests)
        exact = [answer.ids == one.answer for answer, one in zip(found, self._questions, strict=True)]
        rewards = self._data.rewards_of(self._questions, found, self._report)
        return Answered(self._questions, found, self._tokenizer, {"exact": np.array(exact, float), **rewards})


@dataclass(frozen=True)
class Answered:
    """Answers to questions.

    Args:
        tokenizer: of both.
        scores: `exact`, whether an answer is the right one, token by token; and what each reward says of it: a number
            for each, NaN where one failed.
    """

    questions: Sequence[Question]
    answers: Sequence[Answer]
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
                "answer": answer.text,
                "scores": {name: float(values[row]) for name, values in self.scores.items()},
            }
            for row, (question, answer) in enumerate(zip(self.questions[:SHOWN], self.answers, strict=False))
        ]
