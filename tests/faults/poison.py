"""What goes wrong in a run, as parts that its configuration can name: batches, and a step that hangs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Sleeper:
    """A tracker that never returns from step `at`: what a hung step looks like."""

    at: int

    def open(self, run_dir: Path) -> "Sleeper":
        return self

    def start(self, info: Mapping[str, Any], step: int = 0) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.at:
            sleep_without_end()

    def finish(self) -> None:
        pass


def sleep_without_end() -> None:
    time.sleep(10_000)
