"""`Selection`, which of the sampled answers are trained on, and the batch that they make."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from axon.data.feed import Batch
from axon.train.policy_gradient import SAMPLED
from axon.tune import packing
from axon.tune.episodes import Episode
from axon.tune.rollout import Rollout


@dataclass(frozen=True)
class Selection:
    """Which answers a batch is of.

    Args:
        seq: positions of a sequence. advantages: of rewards `prompts samples`, for a policy gradient of all answers;
            None: text alone, of the best answers to each prompt, `count` at most, whose reward is larger than `above`.
    """

    seq: int
    advantages: Callable[[np.ndarray], np.ndarray] | None
    count: int
    above: float

    def rows(self, rollout: Rollout, groups: np.ndarray) -> list[int | None]:
        """The answers to the prompts `groups`, as numbers of the rollout's; None in the places of those that failed, or
        that are not among the best."""
        every = np.arange(rollout.rewards.size).reshape(rollout.rewards.shape)
        if self.advantages is not None:
            return [None if np.isnan(rollout.rewards.flat[row]) else row for row in every[groups].ravel().tolist()]
        return [
            None if best is None else int(every[group, best])
            for group in groups
            for best in best_of(rollout.rewards[group], self.count, self.above)
        ]

    def batch(self, rollout: Rollout, groups: np.ndarray) -> Batch:
        """The arrays of the global batch."""
        rows = self.rows(rollout, groups)
        examples = [[] if row is None else [rollout.example(row)] for row in rows]
        batch = packing.batch_of(examples, self.seq, "documents")
        if self.advantages is not None:
            advantages = self.advantages(rollout.rewards[groups]).ravel()
            batch |= policy_arrays(batch["weights"], rows, rollout.episodes, advantages)
        return batch


def best_of(rewards: np.ndarray, count: int, above: float) -> Iterator[int | None]:
    """The places of the `count` best of some answers' rewards `samples` that are larger than `above`, the earlier of
    equals first; None in the places of those that are missing."""
    ranked = sorted(np.flatnonzero(rewards > above).tolist(), key=lambda place: -rewards[place])[:count]
    yield from (*ranked, *[None] * (count - len(ranked)))


def policy_arrays(
    weights: np.ndarray, rows: Sequence[int | None], episodes: Sequence[Episode], advantages: np.ndarray
) -> Batch:
    """The arrays `SAMPLED` of a batch: where its `weights`, `batch seq`, are 1, and 0 elsewhere. `advantages`, `batch`,
    are of its sequences, which are `rows` of all `episodes`."""
    batch = {name: np.zeros_like(weights) for name in SAMPLED}
    for place, row in enumerate(rows):
        if row is not None:
            own = place, weights[place] > 0
            batch["logprobs"][own] = [one.logprob for one in episodes[row].logprobs]
            batch["advantages"][own] = advantages[place]
    return batch
