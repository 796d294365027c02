"""`PartialRolloutFeed`, batches of episodes that several steps have sampled."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from axon.data.feed import Batch, FeedContext
from axon.errors import Unavailable
from axon.train.state import State
from axon.tune.estimator import Estimator
from axon.tune.partial_rollouts import PartialBatch, PartialSampler
from axon.tune.policy_sampler import PolicySampler
from axon.tune.prompts import PromptOrder
from axon.tune.rollout_feed import RolloutFeed
from axon.tune.selection import Selection


class PartialRolloutFeed(RolloutFeed):
    """As `RolloutFeed`, where each step continues the episodes of all batches that wait.

    Its `rollout_staleness` is the mean of the sampled tokens' steps since; `rollout_parts` that of an episode's parts.
    """

    def __init__(
        self,
        context: FeedContext,
        order: PromptOrder,
        sampler: PolicySampler,
        selection: Selection,
        estimator: Estimator,
        staleness: int,
        parts: PartialSampler,
    ):
        self._parts = parts
        super().__init__(context, order, sampler, selection, estimator, 0, staleness)

    def draw(self, state: State) -> Batch:
        while len(self._pending) <= self._staleness:
            number = next(self._numbers)
            self._pending.append(self._parts.begun(number, self._order.batch(number)))
        batch = self._pending[0]
        self._parts.advance(state, self._pending, batch.number)
        rollout = self._sampler.rollout(batch.prompts, [one.episode for one in batch.episodes])
        step, groups = int(state.step), np.arange(len(batch.prompts))
        drawn = self._drawn(state, step, batch.number, rollout, groups)
        self._pending.popleft()
        own = {
            "rollout_staleness": float(np.mean(step - batch.versions)) if batch.versions.size else 0.0,
            "rollout_parts": float(np.mean([one.parts for one in batch.episodes])),
        }
        self._metrics = {**drawn.metrics, **own}
        return self._of_process(drawn)

    def saved(self) -> dict[str, Any]:
        """The episodes that have not ended, and those that wait for their step; without the parts that cannot be had,
        which are sampled again."""
        with suppress(Unavailable):
            self._parts.finish()
        return {"pending": [one.saved() for one in self._pending]} if self._pending else {}

    def _restored(self) -> Iterator[PartialBatch]:
        for one in self._waiting("episodes"):
            yield self._parts.begun(one["number"], self._order.batch(one["number"]), one["episodes"])
