"""`Rollout`, prompts with the answers that a model sampled to each, and what rewards say of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from axon.tune import packing
from axon.tune.episodes import ENVIRONMENT, Episode, metrics_of
from axon.tune.judge import Scores, without_failed
from axon.tune.prompt import Prompt


@dataclass(frozen=True)
class Rollout:
    """Prompts, so many episodes of each in a row, and what rewards say of all. Without an environment an episode is an
    answer."""

    prompts: Sequence[Prompt]
    episodes: Sequence[Episode]
    scores: Scores

    @cached_property
    def rewards(self) -> np.ndarray:
        """The reward of each answer, `prompts samples`; NaN where one failed."""
        return self.scores.total.reshape(len(self.prompts), -1)

    @cached_property
    def uniform(self) -> np.ndarray:
        """A mask `prompts`, of those to which no two answers differ in their reward."""
        real = ~np.isnan(self.rewards)
        highest = np.max(self.rewards, axis=1, where=real, initial=-np.inf)
        return highest <= np.min(self.rewards, axis=1, where=real, initial=np.inf)

    def __add__(self, other: "Rollout") -> "Rollout":
        scores = self.scores + other.scores
        return Rollout([*self.prompts, *other.prompts], [*self.episodes, *other.episodes], scores)

    def example(self, rows: Sequence[int]) -> packing.Example:
        """The episodes `rows`, each after the prompt that they share; of them the tokens are learned that the model
        sampled."""
        prompt, documents = self.prompts[rows[0] // self.rewards.shape[1]], []
        for episode in (self.episodes[row] for row in rows):
            ids = np.array([*prompt.ids, *episode.ids], np.int32)
            weights = np.concatenate((np.zeros(len(prompt.ids)), episode.sampled), dtype=np.float32)
            documents.append(packing.Document(ids, weights))
        return packing.Example(tuple(documents), prompt.where)

    def logprobs(self, rows: Sequence[Sequence[int]], weights: np.ndarray) -> np.ndarray:
        """The log-probabilities by which tokens were sampled, in the places `batch seq` of positive `weights`; each of
        the `rows` has the number of its episode, or none."""
        found = np.zeros_like(weights)
        for place, row in enumerate(rows):
            for number in row:
                found[place, weights[place] > 0] = [one.logprob for one in self.episodes[number].logprobs]
        return found

    @property
    def metrics(self) -> dict[str, float]:
        """See `RolloutFeed.metrics`."""
        real = without_failed(self.scores.named)
        means = {name: float(np.mean(values)) for name, values in real.items()}
        spreads = {f"{name}_std": float(np.std(values)) for name, values in real.items()}
        own = metrics_of(self.episodes) if ENVIRONMENT in self.scores.each else {}
        if self.scores.each:
            own["reward_failed"] = float(np.sum(np.isnan(self.scores.total)))
            own["rollout_uniform"] = float(np.mean(self.uniform))
        return {
            **means,
            **spreads,
            **own,
            "rollout_tokens": float(np.mean([np.sum(one.sampled) for one in self.episodes])),
        }
