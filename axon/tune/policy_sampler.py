"""`PolicySampler`, answers by a state's weights to prompts, each with noise of its own, and their rewards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

import numpy as np

from axon.serve.offline import Answer
from axon.serve.request import Sampling
from axon.train.state import State
from axon.tune.episode_runner import EpisodeRunner
from axon.tune.episodes import Episode
from axon.tune.policy_engine import PolicyEngine, checked
from axon.tune.prompt import Prompt
from axon.tune.rollout import Rollout
from axon.tune.scoring import Scoring
from axon.tune.starts import Start


class Player(Protocol):
    """Plays episodes by a state's weights.

    beside: whether in other processes, while this one does something else.
    """

    beside: ClassVar[bool]

    def begin(self, state: State, starts: Sequence[Start]) -> Callable[[], list[Episode]]:
        """What waits for the episode of each start, and may be called in another thread. The state may change once this
        returns."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EnginePlayer:
    """Plays at once, by an engine of this process; without a runner an episode is a single answer."""

    beside: ClassVar[bool] = False

    engine: PolicyEngine
    runner: EpisodeRunner | None

    def begin(self, state: State, starts: Sequence[Start]) -> Callable[[], list[Episode]]:
        episodes = played(self.engine, self.runner, state, starts)
        return lambda: episodes

    def close(self) -> None:
        """Give the engine's pages back, and the environment's processes."""
        self.engine.close()
        if self.runner is not None:
            self.runner.close()


@dataclass(frozen=True)
class Noise:
    """How answers are drawn, each with noise of its own: `sampling`, but for its seed, and the run's `seed`."""

    sampling: Sampling
    seed: int

    def __call__(self, number: int, row: int, choice: int, turn: int) -> Sampling:
        """How turn `turn` of an answer to the prompt in `row` of batch `number` is drawn."""
        place = (number, row, turn) if turn else (number, row)
        key = np.random.SeedSequence((self.seed, self.sampling.seed), spawn_key=place)
        return replace(self.sampling, seed=int(key.generate_state(1, np.uint64)[0])).of_choice(choice)


class PolicySampler:
    """Samples answers to prompts, and asks rewards of them.

    Args:
        player: samples. scoring: says how good they are. noise: how an answer is drawn. samples: answers to a prompt.
    """

    def __init__(self, player: Player, scoring: Scoring, noise: Noise, samples: int):
        self._player, self._scoring, self._noise, self._samples = player, scoring, noise, samples

    @property
    def scores_on_devices(self) -> bool:
        """Whether rewards are computed on the run's devices."""
        return self._scoring.on_devices

    def __call__(self, state: State, number: int, prompts: Sequence[Prompt], first: int = 0) -> Callable[[], Rollout]:
        """Samples answers to prompts of batch `number`, for which `first` were drawn before. What is returned waits for
        them and asks their rewards, in any one thread."""
        starts = [
            Start(prompt, partial(self._noise, number, row, choice))
            for row, prompt in enumerate(prompts, first)
            for choice in range(self._samples)
        ]
        wait = self._player.begin(state, starts)
        return lambda: self.rollout(prompts, wait())

    def rollout(self, prompts: Sequence[Prompt], episodes: Sequence[Episode]) -> Rollout:
        """The rollout of prompts, and so many episodes of each in a row, with their rewards."""
        asked = [prompt for prompt in prompts for _ in range(self._samples)]
        return Rollout(prompts, episodes, self._scoring(asked, episodes))

    def stop(self) -> None:
        """End what is being sampled."""
        self._player.close()

    def close(self) -> None:
        """End the rewards' thread."""
        self._scoring.close()


def played(engine: PolicyEngine, runner: EpisodeRunner | None, state: State, starts: Sequence[Start]) -> list[Episode]:
    """The episode of each start by the state's weights, without a runner a single answer; the engine's memory of keys
    and values is given back after them."""
    if runner is not None:
        episodes = runner(engine.engine(state), starts, partial(checked, state=state))
    else:
        requests = [start.request((), start.prompt.ids) for start in starts]
        sampled = zip(starts, engine.answers(state, requests), strict=True)
        episodes = [_of_answer(engine, start, answer) for start, answer in sampled]
    engine.release()
    return episodes


def _of_answer(engine: PolicyEngine, start: Start, answer: Answer) -> Episode:
    whole = start.joined(0, start.prompt.ids, answer, engine.tokenizer)
    return Episode.of_answer(whole, start.goes_on(0, whole))
