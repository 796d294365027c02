"""`RolloutFeed`, batches of the answers that a run's model samples."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np

from axon.data.feed import Batch, Feed, FeedContext
from axon.errors import Unavailable
from axon.train.state import State
from axon.tune import packing
from axon.tune.drawn import Drawn, Later, done
from axon.tune.estimator import Estimator
from axon.tune.policy_sampler import PolicySampler
from axon.tune.prompts import PromptOrder
from axon.tune.rollout import Rollout
from axon.tune.selection import Selection


class RolloutFeed(Feed):
    """Batches of the answers that a run's model gives as it is."""

    sees_state = True

    def __init__(
        self,
        context: FeedContext,
        order: PromptOrder,
        sampler: PolicySampler,
        selection: Selection,
        estimator: Estimator,
        redraws: int,
        staleness: int,
    ):
        """`redraws`, `staleness`: see `axon.tune.rollouts.Rollouts`."""
        self._context, self._order, self._sampler = context, order, sampler
        self._selection, self._estimator = selection, estimator
        self._redraws, self._staleness = redraws, staleness
        self._pending: deque[Any] = deque(self._restored())
        self._metrics: Mapping[str, float] = {}
        self._numbers = islice(context.numbers(), len(self._pending), None)
        self._rewarding = ThreadPoolExecutor(1)

    @property
    def metrics(self) -> Mapping[str, float]:
        """`reward` and `reward_std`: mean and standard deviation of the answers'; `reward_NAME` and `reward_NAME_std`:
        of each reward; `reward_failed`: of how many answers one failed; `rollout_uniform`: the share of prompts of
        which no two answers differ in their reward; `rollout_dropped`: of those that were replaced; `rollout_tokens`:
        the mean of an answer's; all of these are of all that was drawn. `rollout_trained`: the share of the batch's
        sequences that are trained on. With an environment also those of `axon.tune.episodes.metrics_of`.
        `rollout_staleness`: the steps since the batch was sampled."""
        return self._metrics

    def draw(self, state: State) -> Batch:
        while len(self._pending) <= self._staleness:
            self._pending.append(self._begin(state, next(self._numbers)))
        try:
            drawn = self._pending.popleft().result()
        except Unavailable:
            self._pending.clear()  # so that those that wait are sampled again
            raise
        self._metrics = {**drawn.metrics, "rollout_staleness": float(int(state.step) - drawn.step)}
        return self._of_process(drawn)

    def _of_process(self, drawn: Drawn) -> Batch:
        return {name: value[self._context.sequences] for name, value in drawn.arrays.items()}

    def saved(self) -> dict[str, Any]:
        """The batches that wait for their steps; none where one cannot be had, so that they are sampled again."""
        try:
            waiting = [one.result().saved() for one in self._pending]
        except Unavailable:
            return {}
        return {"pending": waiting} if waiting else {}

    def _restored(self) -> Iterator[Any]:
        """The batches that waited when the checkpoint was written, as they are to wait now."""
        return (done(Drawn.restored(one)) for one in self._waiting("arrays"))

    def _waiting(self, field: str) -> Sequence[Mapping[str, Any]]:
        """The saved form of each batch that waited when the checkpoint was written, `field` in it; none, which is
        said, where other batches are to be trained on now, or an earlier version of Axon saved them in another form."""
        waiting = self._context.saved.get("pending", ())
        numbers = islice(self._context.numbers(), len(waiting))
        if all(one["number"] == number and field in one for number, one in zip(numbers, waiting, strict=True)):
            return waiting
        self._context.report(
            f"answers that waited in the checkpoint ({len(waiting)} batches of them) are not of the batches that are "
            "trained on now: those are sampled anew"
        )
        return ()

    def _begin(self, state: State, number: int) -> Future[Drawn] | Later:
        """Batch `number`, sampled by the state's weights. Its rewards are asked in a thread, unless redraws or what the
        objective estimates by these weights wait for them, or the devices compute some; and of several processes, which
        share them, when the batch is trained on."""
        prompts = self._order.batch(number)
        ask, made = self._sampler(state, number, prompts), partial(self._drawn, state, int(state.step), number)
        if self._waits:
            return done(made(*self._redrawn(state, number, ask())))

        def rewarded() -> Drawn:
            return made(ask(), np.arange(len(prompts)))

        return self._rewarding.submit(rewarded) if jax.process_count() == 1 else Later(rewarded)

    @property
    def _waits(self) -> bool:
        """Whether a batch is scored before the step that runs beside it."""
        asks_before = self._context.objective.asks_before or self._sampler.scores_on_devices
        return self._redraws > 0 or asks_before

    def _redrawn(self, state: State, number: int, rollout: Rollout) -> tuple[Rollout, np.ndarray]:
        """All that is drawn for batch `number`, after these prompts, and which of its prompts the batch is of."""
        further, groups = self._order.further(number), np.arange(len(rollout.prompts))
        for _ in range(self._redraws):
            uniform = np.flatnonzero(rollout.uniform[groups])
            more = list(islice(further, len(uniform)))
            if not more:
                break
            groups[uniform[: len(more)]] = len(rollout.prompts) + np.arange(len(more))
            rollout += self._sampler(state, number, more, len(rollout.prompts))()
        return rollout, groups

    def _drawn(self, state: State, step: int, number: int, rollout: Rollout, groups: np.ndarray) -> Drawn:
        rows = self._selection.rows(rollout, groups)
        examples = [[rollout.example(row)] if row else [] for row in rows]
        batch = packing.batch_of(examples, self._estimator.seq, self._selection.documents)
        estimate = partial(self._estimator, state)
        if self._selection.logprobs:
            batch["logprobs"] = rollout.logprobs(rows, batch["weights"])
        learned, own = self._selection.learned(self._context.objective, batch, rollout.rewards[groups], estimate)
        metrics = {
            **rollout.metrics,
            **own,
            "rollout_dropped": 1 - len(groups) / len(rollout.prompts),
            "rollout_trained": float(np.mean([bool(row) for row in rows])),
        }
        return Drawn(number, step, batch | learned, metrics)

    def close(self) -> None:
        """Gives the engine's pages back, and the processes and threads that sample and reward."""
        self._sampler.stop()
        self._rewarding.shutdown(cancel_futures=True)
        self._sampler.close()
