"""Evaluation of an objective: its sums over a batch, without gradients and without an optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array

from axon.runtime import Runtime
from axon.train import feed
from axon.train.objective import Batch, Objective

BATCH = ("batch", "seq")


@dataclass(frozen=True)
class Evaluator:
    """What `objective` is on batches of `batch` sequences of `seq` positions, by a runtime."""

    runtime: Runtime
    objective: Objective
    batch: int
    seq: int

    def __call__(self, parameters: Any, batch: Batch, variables: Any = None) -> dict[str, tuple[Array, Array]]:
        """Name of each metric → (sum, count) over a batch: `loss` in nats, and its tokens."""
        with self.runtime.tracing():
            return self._compiled(parameters, variables or {}, batch)

    @cached_property
    def _compiled(self) -> Any:
        def evaluate(parameters: Any, variables: Any, batch: Batch) -> dict[str, tuple[Array, Array]]:
            sums = self.objective.sums(self.runtime.bind(parameters, variables), batch)
            counts = self.objective.counts(batch)
            return {name: (value, counts.get(name, counts["tokens"])) for name, value in sums.metrics.items()}

        return self.runtime.jit(evaluate)

    def place(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """The sequences of the global batch that this process holds (`host_sequences`), as sharded arrays."""
        sharding = self.runtime.placement.sharding(BATCH)
        return feed.place(sharding, dict(batch), self.host_sequences, self.batch)

    @cached_property
    def host_sequences(self) -> np.ndarray:
        """Numbers of the sequences of the global batch that this process has to read: all of them in a run of one."""
        return feed.host_sequences(self.runtime.placement.sharding(BATCH), (self.batch, self.seq))

    @cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a global batch."""
        return self.runtime.abstract(dict(self.objective.specs(self.batch, self.seq)))
