"""What goes wrong in a run, as parts that its configuration can name: batches, and a step that hangs or waits."""

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
class Held:
    """A tracker that returns from no step from `at` on before its run is released: a step that hangs, or a run that
    cannot end before a test has done to it what it does."""

    at: int
    folder: str = ""

    def open(self, run_dir: Path) -> "Held":
        return replace(self, folder=str(run_dir))

    def start(self, info: Mapping[str, Any], step: int = 0) -> None:
        pass

    def log(self, step: int, values: Mapping[str, float]) -> None:
        while step >= self.at and not (Path(self.folder) / RELEASED).exists():
            sleep_while_held()

    def finish(self) -> None:
        pass


def sleep_while_held() -> None:
    time.sleep(0.05)


RELEASED = "released"
HELD = "\nfrom poison import Held\nTrain.trackers = (@Held(),)\nHeld.at = {}\n"
"""Lines of a configuration, to be formatted with the step."""


def release(run_dir: Path) -> None:
    """Let the run of this folder end, now or when it is continued."""
    (run_dir / RELEASED).touch()
