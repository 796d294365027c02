"""Answers to held-out questions while a run is evaluated, and how many are right."""

from collections.abc import Sequence

from axon.data import Prepared
from axon.data.prepared import Question
from axon.errors import UserError
from axon.run.tree import Train
from axon.serve.offline import capacity_for
from axon.serve.request import Request, Sampling
from axon.train.state import State
from axon.train.step import Program
from axon.tune.policy_engine import PolicyEngine


def answers_of(train: Train, data: Prepared, program: Program) -> "Answers | None":
    """The answers that `Evaluation.answers` asks for, None for none. Raises `UserError` for data without questions."""
    if train.evaluation is None or (count := train.evaluation.answers) is None:
        return None
    if not (questions := data.questions(count)) or data.tokenizer is None:
        raise UserError(
            f"Evaluation.answers is {count}, and Train.data, a {type(train.data).__name__}, has no held-out questions: "
            "set Train.data = @Chats() with Chats.held_out above 0, or Evaluation.answers to None"
        )
    return Answers(program, data, questions)


class Answers:
    """Asks held-out questions of a run's model as it is, by an engine on the run's devices."""

    def __init__(self, program: Program, data: Prepared, questions: Sequence[Question]):
        assert data.tokenizer is not None
        self._questions = questions
        self._requests = [Request(one.prompt, Sampling(tokens=len(one.answer), temperature=0.0)) for one in questions]
        capacity = capacity_for(program.module, self._requests)
        self._engine = PolicyEngine(program.runtime, None, data.tokenizer, capacity)

    def exact(self, state: State) -> float:
        """The share of the questions that the state's model answers rightly, by the greedy choice of each token."""
        found = self._engine.answers(state, self._requests)
        return sum(answer.ids == one.answer for answer, one in zip(found, self._questions, strict=True)) / len(found)
