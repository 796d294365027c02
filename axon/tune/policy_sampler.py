"""`PolicySampler`, answers by a state's weights to prompts, each with noise of its own, and their rewards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from axon.serve.request import Request, Sampling
from axon.train.state import State
from axon.tune.episode_runner import EpisodeRunner, Start
from axon.tune.episodes import Episode
from axon.tune.judge import Judge, Scores
from axon.tune.policy_engine import PolicyEngine, checked
from axon.tune.prompt import Prompt
from axon.tune.rollout import ENVIRONMENT, Rollout


class PolicySampler:
    """Samples answers to prompts, and asks rewards of them.

    Args:
        engine: answers. judge: asks the rewards. runner: plays episodes of an environment; None: an answer is all.
        sampling: how an answer is drawn, but for its seed. samples: answers to a prompt. seed: the run's.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        judge: Judge,
        runner: EpisodeRunner | None,
        sampling: Sampling,
        samples: int,
        seed: int,
    ):
        self._engine, self._judge, self._runner = engine, judge, runner
        self._sampling, self._samples, self._seed = sampling, samples, seed

    def __call__(self, state: State, number: int, prompts: Sequence[Prompt], first: int = 0) -> Callable[[], Rollout]:
        """Samples answers to prompts of batch `number`, for which `first` were drawn before. What is returned asks the
        rewards of them, in any one thread."""
        starts = [
            Start(prompt, partial(self.sampling_of, number, row, choice))
            for row, prompt in enumerate(prompts, first)
            for choice in range(self._samples)
        ]
        return partial(self._rewarded, prompts, starts, played(self._engine, self._runner, state, starts))

    def _rewarded(self, prompts: Sequence[Prompt], starts: Sequence[Start], episodes: Sequence[Episode]) -> Rollout:
        asked = [start.prompt for start in starts]
        return Rollout(prompts, episodes, scored(self._judge, asked, episodes, self._runner is not None))

    def sampling_of(self, number: int, row: int, choice: int, turn: int) -> Sampling:
        """How turn `turn` of an answer to the prompt in `row` of batch `number` is drawn: all have noise of their
        own."""
        place = (number, row, turn) if turn else (number, row)
        key = np.random.SeedSequence((self._seed, self._sampling.seed), spawn_key=place)
        return replace(self._sampling, seed=int(key.generate_state(1, np.uint64)[0])).of_choice(choice)

    def close(self) -> None:
        """Give the engine's pages back, and the threads and processes of rewards and environment."""
        self._engine.close()
        self._judge.close()
        if self._runner is not None:
            self._runner.close()


def played(engine: PolicyEngine, runner: EpisodeRunner | None, state: State, starts: Sequence[Start]) -> list[Episode]:
    """The episode of each start by the state's weights; without a runner a single answer."""
    if runner is not None:
        return runner(engine.engine(state), starts, partial(checked, state=state))
    requests = [Request(start.prompt.ids, start.sampling(0)) for start in starts]
    return [Episode.of_answer(answer) for answer in engine.answers(state, requests)]


def scored(judge: Judge, prompts: Sequence[Prompt], episodes: Sequence[Episode], has_environment: bool) -> Scores:
    """What the judge says of an episode of each prompt, and, with an environment, what this says."""
    known = {ENVIRONMENT: np.array([episode.reward for episode in episodes])} if has_environment else {}
    return judge([episode.as_sampled(prompt) for prompt, episode in zip(prompts, episodes, strict=True)], known)
