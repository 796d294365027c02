"""Which of a prompt's answers are trained on: all, the best, or the best against the worst."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from axon.checks import check_range
from axon.data import Data
from axon.data.corpus import TEXT_ARRAYS
from axon.data.feed import Batch
from axon.data.prepared import BatchReader
from axon.errors import UserError
from axon.train.policy_gradient import SAMPLED, Estimate, PolicyObjective
from axon.train.preference import ANSWERS, Preference
from axon.tune.chats import Chats
from axon.tune.rollout import Rollout

Row = tuple[int, ...]
"""The answers in a sequence, by number; none: the sequence is padding."""


class Selection(ABC):
    """Which of a prompt's answers a batch has, and its arrays."""

    documents: ClassVar[str] = "documents"
    """Name of the array that says which document a token is of."""
    sides: ClassVar[int] = 1
    """Answers in a sequence, at most."""
    logprobs: ClassVar[bool] = False
    """Whether a batch has `logprobs`, those by which each token was sampled."""

    @property
    def arrays(self) -> Mapping[str, str]:
        """Name → axes of the arrays of a batch."""
        return {self.documents if name == "documents" else name: axes for name, axes in TEXT_ARRAYS.items()}

    @abstractmethod
    def sequences(self, samples: int) -> int:
        """Sequences of a batch that a prompt with so many answers has."""

    @abstractmethod
    def places(self, rewards: np.ndarray) -> list[Row]:
        """What is in each of a prompt's sequences, by the rewards of its answers, `samples`; NaN: one failed."""

    def check(self, samples: int) -> None:
        """Raise `UserError` for too few answers to a prompt."""
        return

    def needs_rewards(self, samples: int) -> bool:
        """Whether it depends on the rewards of so many answers to a prompt what is trained on, or how."""
        return True

    def rows(self, rollout: Rollout, groups: np.ndarray) -> list[Row]:
        """What is in each sequence of a batch of the prompts `groups`, as numbers of the rollout's answers."""
        samples = rollout.rewards.shape[1]
        return [
            tuple(int(group) * samples + place for place in places)
            for group in groups
            for places in self.places(rollout.rewards[group])
        ]

    def check_objective(self, objective: Any, samples: int, data: Data | Chats) -> None:
        """Raise `UserError` for an objective that does not learn from these, or not beside the held-out `data`."""
        return

    def learned(
        self, objective: Any, batch: Batch, rewards: np.ndarray, estimate: Estimate
    ) -> tuple[Batch, dict[str, float]]:
        """The arrays of a batch beside those of text and `logprobs`, and metrics. `rewards`: of the answers to its
        prompts, `prompts samples`."""
        return {}, {}

    def held_out(self, reader: BatchReader) -> BatchReader:
        """Held-out batches of text as the objective takes them."""
        return reader


@dataclass(frozen=True)
class AllAnswers(Selection):
    """All answers that have a reward, for a `PolicyObjective` as `GRPO`: beside text a batch has `logprobs`, by which
    each token was sampled, and what the objective makes of the rewards, as `advantages`."""

    logprobs: ClassVar[bool] = True

    @property
    def arrays(self) -> Mapping[str, str]:
        return {**super().arrays, **dict.fromkeys(SAMPLED, "batch seq")}

    def sequences(self, samples: int) -> int:
        return samples

    def places(self, rewards: np.ndarray) -> list[Row]:
        return [() if math.isnan(reward) else (place,) for place, reward in enumerate(rewards)]

    def check_objective(self, objective: Any, samples: int, data: Data | Chats) -> None:
        if not isinstance(objective, PolicyObjective):
            raise UserError(
                f"Train.objective is a {type(objective).__name__}, and Rollouts.selection AllAnswers(), which are "
                "learned from by their rewards: set Train.objective = @GRPO(), or Rollouts.selection to @BestAnswers() "
                "or @BestAndWorst()"
            )
        objective.check_group(samples, "Rollouts.samples")

    def learned(
        self, objective: Any, batch: Batch, rewards: np.ndarray, estimate: Estimate
    ) -> tuple[Batch, dict[str, float]]:
        return objective.learned(batch, rewards, estimate)


@dataclass(frozen=True)
class BestAnswers(Selection):
    """The best answers to each prompt, as text: expert iteration (Anthony et al., arXiv:1705.08439), as
    rejection-sampling fine-tuning (ReST, arXiv:2308.08998) in every step. Where these are all of them no reward is
    needed, as for `Distillation` of what the model itself samples (Agarwal et al., arXiv:2306.13649).

    Args:
        count: of them, at most. above: only those whose reward is larger than this.
    """

    count: int = 1
    above: float = -math.inf

    def __post_init__(self):
        check_range(self, "[1, 2**16]", "count")

    def sequences(self, samples: int) -> int:
        return self.count

    def check(self, samples: int) -> None:
        if self.count > samples:
            raise UserError(
                f"BestAnswers.count is {self.count}, and Rollouts.samples {samples}: no more can be kept than there "
                f"are. Set Rollouts.samples to at least {self.count}"
            )

    def needs_rewards(self, samples: int) -> bool:
        return self.count < samples or self.above > -math.inf

    def places(self, rewards: np.ndarray) -> list[Row]:
        ranked = _ranked(rewards, np.flatnonzero(rewards > self.above))[: self.count]
        return [*((place,) for place in ranked), *[()] * (self.count - len(ranked))]


@dataclass(frozen=True)
class BestAndWorst(Selection):
    """The best answer to each prompt, chosen, beside the worst, rejected, in one sequence: pairs for a preference
    objective by the policy's own answers, as online DPO (Guo et al., arXiv:2402.04792). A prompt of which no two
    answers differ in their reward gives none. Held-out texts are chosen ones without a rejected one."""

    documents: ClassVar[str] = ANSWERS
    sides: ClassVar[int] = 2

    def sequences(self, samples: int) -> int:
        return 1

    def check(self, samples: int) -> None:
        if samples < 2:
            raise UserError(
                f"Rollouts.samples is {samples}, and Rollouts.selection BestAndWorst(), which compares two answers: "
                "set Rollouts.samples to at least 2"
            )

    def check_objective(self, objective: Any, samples: int, data: Data | Chats) -> None:
        if not isinstance(objective, Preference):
            raise UserError(
                f"Train.objective is a {type(objective).__name__}, and Rollouts.selection BestAndWorst(), whose pairs "
                "are for a preference: set Train.objective = @DPO(), or Rollouts.selection to @AllAnswers()"
            )
        if isinstance(data, Data) or data.packed > objective.pairs:
            has = "Data" if isinstance(data, Data) else f"Chats with {data.packed} examples in a sequence, at most"
            raise UserError(
                f"Rollouts.data is {has}, and {type(objective).__name__}.pairs {objective.pairs}, of which each "
                f"held-out example is one: set Rollouts.data = @Chats(), and Chats.packed to at most {objective.pairs}"
            )

    def places(self, rewards: np.ndarray) -> list[Row]:
        ranked = _ranked(rewards, np.flatnonzero(~np.isnan(rewards)))
        differ = len(ranked) > 1 and rewards[ranked[0]] > rewards[ranked[-1]]
        return [(ranked[0], ranked[-1]) if differ else ()]

    def held_out(self, reader: BatchReader) -> BatchReader:
        return _Chosen(reader)


class _Chosen(BatchReader):
    """Batches of text as pairs that have no rejected answer."""

    def __init__(self, reader: BatchReader):
        self._reader = reader

    def __next__(self) -> Batch:
        batch = next(self._reader)
        documents = batch.pop("documents")
        return batch | {ANSWERS: np.where(documents < 0, documents, 2 * documents)}

    def __exit__(self, *exception: Any) -> None:
        self._reader.__exit__(*exception)


def _ranked(rewards: np.ndarray, places: np.ndarray) -> list[int]:
    """The places with the best reward first, the earlier of equals first."""
    return sorted(places.tolist(), key=lambda place: -rewards[place])
