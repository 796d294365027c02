"""Batches that go wrong, by what is in them: an objective that a run's configuration can name."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from axon.train.objective import Batch, NextToken, Sums


@dataclass(frozen=True)
class Poisoned(NextToken):
    """Next token, with a loss `times` as large (None: not a number) in batches with a sequence whose tokens add up to
    one of `totals`."""

    totals: tuple[int, ...] = ()
    times: float | None = None

    def sums(self, module, batch: Batch, key=None) -> Sums:
        found = super().sums(module, batch, key)
        totals = jnp.sum(batch["tokens"], axis=1)
        bad = jnp.any(jnp.stack([jnp.any(totals == one) for one in self.totals]))
        factor = jnp.where(bad, jnp.nan if self.times is None else self.times, 1.0)
        minimised, metrics = jax.tree.map(lambda x: x * factor, (found.minimised, found.metrics))
        return replace(found, minimised=minimised, metrics=metrics)
