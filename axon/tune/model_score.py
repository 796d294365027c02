"""`ModelScore`, a reward that a frozen model on the mesh gives, and `ModelScorer`, which computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.checks import check_range
from axon.errors import UserError
from axon.train.evaluate import Evaluator
from axon.train.objective import Batch
from axon.train.preference import ANSWERS, Reward
from axon.train.references import References
from axon.tune import packing
from axon.tune.episodes import Episode
from axon.tune.prompt import Prompt


@dataclass(frozen=True)
class ModelScore:
    """The score of a frozen reward model at an answer's last token, as the objective `Reward` trains it; of an episode
    of several answers that at its end.

    The model is one of `Train.references`, on the layout of the run, and of the same tokens: nothing is encoded again.

    Args:
        reference: its name there. scale, shift: the reward is scale · (score − shift).
    """

    reference: str = "scorer"
    scale: float = 1.0
    shift: float = 0.0

    def __post_init__(self):
        check_range(self, "(-inf, inf)", "scale", "shift")


class ModelScorer:
    """Scores of episodes by a frozen model, computed by all processes of a run together.

    Args:
        score: which model. references: has it. batch, seq: sequences and positions that are computed at a time.
    """

    def __init__(self, score: ModelScore, references: References, batch: int, seq: int):
        """Raises `UserError` for a model that gives no scores."""
        if (runtime := references.runtimes.get(score.reference)) is None:
            raise UserError(
                f"ModelScore.reference is {score.reference!r}, and that is AdaptersOff(), which writes tokens: set "
                f"Train.references = {{{score.reference!r}: @Reference()}}, of a RewardModel"
            )
        self._score, self._references = score, references
        self._evaluator = Evaluator(runtime, Reward(pairs=1), batch, seq)
        self._evaluator.objective.check(runtime.module)

    def __call__(self, prompts: Sequence[Prompt], episodes: Sequence[Episode]) -> np.ndarray:
        """The reward of the episode of each prompt, `len(prompts)`; NaN where one has no answer."""
        pairs = zip(prompts, episodes, strict=True)
        rows = [[_example(prompt, episode)] if episode.turns else [] for prompt, episode in pairs]
        count = self._evaluator.batch
        padded = [*rows, *[[]] * (-len(rows) % count)]
        found = np.concatenate([self._scores(padded[at : at + count]) for at in range(0, len(padded), count)])
        scores = np.where([bool(row) for row in rows], found[: len(rows)], np.nan).astype(float)
        return self._score.scale * (scores - self._score.shift)

    def _scores(self, rows: Sequence[Sequence[packing.Example]]) -> np.ndarray:
        evaluator, values = self._evaluator, self._references.given[self._score.reference]
        batch = packing.batch_of(rows, evaluator.seq, ANSWERS)
        own = evaluator.place({name: value[evaluator.host_sequences] for name, value in batch.items()})
        with evaluator.runtime.tracing():
            return np.asarray(self._compiled(values, own))

    @cached_property
    def _compiled(self) -> Any:
        objective, name = self._evaluator.objective, self._score.reference
        assert isinstance(objective, Reward)

        def scores(values: Mapping[str, Any], batch: Batch) -> Array:
            found, _ = objective.scores(self._references.frozen(name, values), batch)
            return axes.reshard(found[:, 0, 0], PartitionSpec())

        return self._evaluator.runtime.jit(scores)


def _example(prompt: Prompt, episode: Episode) -> packing.Example:
    ids = np.array([*prompt.ids, *episode.ids], np.int32)
    weights = np.arange(len(ids)) >= len(prompt.ids)
    return packing.Example((packing.Document(ids, weights.astype(np.float32)),), prompt.where)
