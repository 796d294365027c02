"""`Scoring`, all that says how good episodes are: frozen models, the environment, and rewards."""

from collections.abc import Mapping, Sequence

import numpy as np

from axon.tune.episodes import ENVIRONMENT, Episode
from axon.tune.judge import Judge, Scores
from axon.tune.model_score import ModelScorer
from axon.tune.prompt import Prompt


class Scoring:
    """Says how good episodes are.

    Args:
        judge: asks the rewards. models: name of a reward → the frozen model that gives it, by a computation of all
            devices. has_environment: whether episodes have rewards of their own.
    """

    def __init__(self, judge: Judge, models: Mapping[str, ModelScorer], has_environment: bool):
        self._judge, self._models, self._has_environment = judge, models, has_environment

    @property
    def on_devices(self) -> bool:
        """Whether it computes anything on the run's devices."""
        return bool(self._models)

    def __call__(self, prompts: Sequence[Prompt], episodes: Sequence[Episode]) -> Scores:
        """What is said of an episode of each prompt."""
        known = {name: model(prompts, episodes) for name, model in self._models.items()}
        if self._has_environment:
            known[ENVIRONMENT] = np.array([episode.reward for episode in episodes])
        answers = [episode.as_sampled(prompt) for prompt, episode in zip(prompts, episodes, strict=True)]
        return self._judge(answers, known)

    def close(self) -> None:
        """End the judge's thread."""
        self._judge.close()
