"""Answers to held-out questions while a run is evaluated: how many are right, and what rewards say of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from axon.data import Prepared
from axon.data.prepared import Question
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.nn.adapter_set import factors_of_adapter
from axon.nn.lora import one_adapter
from axon.run.tree import Train
from axon.runtime import Runtime, flattened, nested
from axon.serve.offline import capacity_for
from axon.serve.request import Request, Sampling
from axon.train.state import State
from axon.train.step import Program
from axon.tune.episode_runner import EpisodeRunner
from axon.tune.episodes import Episode
from axon.tune.examples import PreparedExamples
from axon.tune.judge import without_failed
from axon.tune.policy_engine import PolicyEngine
from axon.tune.policy_sampler import played
from axon.tune.prompt import Prompt
from axon.tune.prompts import of_question
from axon.tune.starts import Start

SHOWN = 12
"""Answers of an evaluation that are kept in its event, with their questions: the first."""


def answers_of(
    train: Train, data: Prepared, program: Program, report: Callable[[str], None] = print
) -> "Answers | None":
    """The answers that `Evaluation.answers` asks for, None for none. Raises `UserError` for data without questions."""
    if train.evaluation is None or (count := train.evaluation.answers) is None:
        return None
    asked = _asked(train, data, count)
    if data.tokenizer is None or (without := [name for name, questions in asked.items() if not questions]):
        whose = f" for the adapter {without[0]!r}" if data.tokenizer is not None and without[0] else ""
        raise UserError(
            f"Evaluation.answers is {count}, and Train.data, a {type(train.data).__name__}, has no held-out questions"
            f"{whose}: set Train.data = @Chats() with Chats.held_out above 0, or Evaluation.answers to None"
        )
    return Answers(program, data, asked, report)


def _asked(train: Train, data: Prepared, count: int) -> dict[str, Sequence[Question]]:
    """The questions that each adapter is asked, by its name, where several are trained at once; else those of '', the
    model."""
    if not train.adapters:
        return {"": data.questions(count)}
    assert isinstance(data, PreparedExamples)  # adapters are trained on others nowhere
    return {name: data.questions(count, name) for name in train.adapters}


class Answers:
    """Asks held-out questions of a run's model as it is, by an engine on the run's devices; where several adapters are
    trained at once, of each those that are `asked` of it, by its name: '' for the model where there is one alone."""

    def __init__(
        self,
        program: Program,
        data: Prepared,
        asked: Mapping[str, Sequence[Question]],
        report: Callable[[str], None] = print,
    ):
        assert data.tokenizer is not None
        self._questions = [one for questions in asked.values() for one in questions]
        self._adapters, self._tokenizer = _repeated(asked), data.tokenizer
        self._runner: EpisodeRunner | None = data.runner(report)
        self._starts = [
            _start(of_question(one, data.tokenizer), len(one.answer), self._runner) for one in self._questions
        ]
        requests = [_longest(start, self._runner) for start in self._starts]
        self._rewards = data.rewards(program.references, report)
        self._runtime = program.runtime if "" in asked else _of_one_adapter(program.runtime)
        self._engine = PolicyEngine(self._runtime, None, data.tokenizer, capacity_for(program.module, requests))

    def __call__(self, state: State) -> "Answered":
        """What the state's model answers, by the greedy choice of each token."""
        questions, episodes = self._questions, self._episodes(state)
        exact = [_last(episode) == one.answer for episode, one in zip(episodes, questions, strict=True)]
        if self._runner is not None:
            self._runner.close()
        rewards = self._rewards(questions, episodes)
        turns = {} if self._runner is None else {"turns": np.array([len(one.turns) for one in episodes], float)}
        scores = {"exact": np.array(exact, float), **rewards, **turns}
        return Answered(questions, episodes, self._tokenizer, scores, self._adapters)

    def _episodes(self, state: State) -> list[Episode]:
        """One for each question, in their order."""
        episodes = []
        for name in dict.fromkeys(self._adapters):
            starts = [start for start, own in zip(self._starts, self._adapters, strict=True) if own == name]
            episodes += played(self._engine, self._runner, self._of_adapter(state, name), starts)
        return episodes

    def _of_adapter(self, state: State, name: str) -> State:
        """The state of the run that trains one adapter alone, as far as answers depend on it."""
        if not name:
            return state
        own = factors_of_adapter(flattened(state.parameters), self._runtime.parameters, name)
        return replace(state, parameters=nested(own))


def _repeated(asked: Mapping[str, Sequence[Question]]) -> list[str]:
    """The adapter's name of each question."""
    return [name for name, questions in asked.items() for _ in questions]


def _of_one_adapter(runtime: Runtime) -> Runtime:
    """The runtime of a run that trains one of its adapters alone."""
    transforms = one_adapter(runtime.transforms)
    shared = {"precision": runtime.precision, "execution": runtime.execution, "placement": runtime.placement}
    return Runtime(runtime.model, runtime.layout, transforms=transforms, **shared)


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
        adapters: whose each question is, where several are trained at once; else ''.
    """

    questions: Sequence[Question]
    episodes: Sequence[Episode]
    tokenizer: Tokenizer
    scores: Mapping[str, np.ndarray]
    adapters: Sequence[str]

    def metrics(self) -> dict[str, float]:
        """The mean of each score, NaN left out: of all, and as `exact/NAME` of each adapter."""
        found = _means(self.scores)
        for adapter, rows in self._rows.items():
            own = _means({name: values[rows] for name, values in self.scores.items()})
            found |= {f"{name}/{adapter}": mean for name, mean in own.items()} if adapter else {}
        return found

    def __str__(self):
        found = self.metrics()
        own = [f"{name} {found[f'exact/{name}']:.1%}" for name in self._rows if name]
        return f"{found['exact']:.1%} of answers right" + (f" ({', '.join(own)})" if own else "")

    def shown(self) -> list[dict[str, Any]]:
        """The first, of each adapter as many, as texts, with their scores: see `axon.observe.events`."""
        most = max(1, SHOWN // len(self._rows))
        return [self._shown(row) for rows in self._rows.values() for row in rows[:most]]

    def _shown(self, row: int) -> dict[str, Any]:
        return {
            "question": self.tokenizer.visible(self.questions[row].prompt),
            "expected": self.tokenizer.visible(self.questions[row].answer),
            "answer": self.episodes[row].text,
            "scores": {name: float(values[row]) for name, values in self.scores.items()},
        } | ({"adapter": self.adapters[row]} if self.adapters[row] else {})

    @property
    def _rows(self) -> dict[str, list[int]]:
        """The numbers of each adapter's questions."""
        return {
            name: [row for row, own in enumerate(self.adapters) if own == name] for name in dict.fromkeys(self.adapters)
        }


def _means(scores: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in without_failed(scores).items()}
