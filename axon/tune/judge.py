"""`Judge`, which asks rewards of answers. What one does wrong costs the answer, never the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from axon.errors import Unavailable
from axon.launch.agree import from_process_0
from axon.tune.rewards import RewardFunction, Sampled, finite, place_of
from axon.tune.time_limited import TimeLimited


@dataclass(frozen=True)
class Scores:
    """What rewards say of some answers, each in their order; NaN where one failed.

    Args:
        each: name of a reward → numbers. total: their weighted sums.
    """

    each: Mapping[str, np.ndarray]
    total: np.ndarray

    @property
    def named(self) -> dict[str, np.ndarray]:
        """The sums under `reward`, and what each reward says under `reward_NAME`; nothing where there are none."""
        total = {"reward": self.total} if self.each else {}
        return total | {f"reward_{name}": values for name, values in self.each.items()}

    def __add__(self, other: "Scores") -> "Scores":
        each = {name: np.concatenate((values, other.each[name])) for name, values in self.each.items()}
        return Scores(each, np.concatenate((self.total, other.total)))


def without_failed(scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The scores that are numbers, by name; a name of which none is left is left out."""
    real = {name: values[~np.isnan(values)] for name, values in scores.items()}
    return {name: values for name, values in real.items() if len(values)}


class Judge:
    """Asks several rewards of answers, in a thread of their own. Of several processes the first alone asks, and all
    have its scores.

    Args:
        rewards: by name. weights: name → a factor, by default 1. limit: seconds that a reward has for an answer.
        report: called with a line for each reward that failed of some answers.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardFunction],
        weights: Mapping[str, float],
        limit: float,
        report: Callable[[str], None] = print,
    ):
        self._rewards, self._weights, self._report = rewards, weights, report
        self._call = TimeLimited(limit)

    def __call__(self, answers: Sequence[Sampled], known: Mapping[str, np.ndarray] = MappingProxyType({})) -> Scores:
        """`known`: name → numbers that are there already; an answer of which one is NaN is not asked about. Raises
        `Unavailable`, in all processes, where a reward does."""
        there = [place for place in range(len(answers)) if not any(np.isnan(one[place]) for one in known.values())]
        asked = {name: partial(self._asked, name, reward, answers, there) for name, reward in self._rewards.items()}
        each = {**known, **{name: np.array(from_process_0("rewards", ask), float) for name, ask in asked.items()}}
        weighted = [self._weights.get(name, 1.0) * values for name, values in each.items()]
        return Scores(each, np.sum([np.zeros(len(answers)), *weighted], axis=0))

    def close(self) -> None:
        """End the thread."""
        self._call.close()

    def _asked(
        self, name: str, reward: RewardFunction, answers: Sequence[Sampled], there: Sequence[int]
    ) -> list[float]:
        found, failures = [math.nan] * len(answers), []
        for place, said in zip(there, self._call.each(reward, [answers[place] for place in there]), strict=True):
            if isinstance(said, Unavailable):
                raise Unavailable(f"the reward {name!r} ({place_of(reward)}): {said}")
            try:
                found[place] = finite(said)
            except Exception as error:
                failures.append((answers[place], error))
        if failures:
            sampled, error = failures[0]
            self._report(
                f"the reward {name!r} ({place_of(reward)}) failed for {len(failures)} of {len(answers)} answers, which "
                f"are not trained on: of {sampled.answer!r:.80} to {sampled.where}: {type(error).__name__}: {error}"
            )
        return found
