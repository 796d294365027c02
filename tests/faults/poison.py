"""What goes wrong in a run, as parts that its configuration can name: batches, and a step that hangs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from axon.train.objective import Batch, NextToken, Sums


def hashes(tokens):
    """A number for each sequence of `batch seq`, whatever the order of its positions; of NumPy or JAX."""
    return (31 * tokens * tokens + tokens).sum(axis=1)


@dataclass(frozen=True)
class Poisoned(NextToken):
    """Next token, with a loss `times` as large (None: not a number) in batches with a sequence of one of `hashes`."""

    hashes: tuple[int, ...] = ()
    times: float | None = None

    def sums(self, module, batch: Batch, key=None) -> Sums:
        found = super().sums(module, batch, key)
        found_hashes = hashes(batch["tokens"])
        bad = jnp.any(jnp.stack([jnp.any(found_hashes == one) for one in self.hashes]))
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
