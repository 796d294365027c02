"""Gradients of an objective on a pipeline: the blocks on the stages, what is around them shared by all stages."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.axes.memory import to_device
from axon.parallel.pipeline import Table
from axon.parallel.pipeline.delivery import all_there
from axon.parallel.pipeline.execute import Parts, Results, execute, slot_bytes
from axon.parallel.pipeline.rows import SlotBytes
from axon.runtime import flattened, nested
from axon.train import pipeline_forwards
from axon.train.gradients import Counts, log_idle_overlap, with_deferred_gradients
from axon.train.objective import Batch, Sums, means
from axon.train.pipeline import Pipeline
from axon.train.pipeline_split import joined, parted
from axon.train.state import State
from axon.train.whole_batch import Linearised, WholeBatch, by_cached_gradients


@dataclass(frozen=True)
class PipelinedGradients:
    """Gradients by a pipeline; `seed` as of `axon.train.gradients.Gradients`.

    Blocks that give neither auxiliary losses nor statistics are taken to treat each sequence by itself: a device runs
    them on its own sequences, and has a sum of gradients of its own until the last microbatch.

    `references`: the frozen modules that the objective names, without blocks; the batch has what they say of it.
    """

    pipeline: Pipeline
    seed: int
    references: Mapping[str, Any] = field(default_factory=dict)

    def counts(self, batch: Batch) -> Counts:
        return self.pipeline.counts(batch)

    def __call__(self, state: State, batch: Batch, counts: Counts, frozen: Collection[str] = ()) -> tuple[Any, Sums]:
        pipeline = self.pipeline
        if isinstance(pipeline.objective, WholeBatch):
            return self._by_cached_gradients(pipeline.objective, state, batch, counts, frozen)
        pipeline.log("pipeline", pipeline.table)
        results = execute(pipeline.table, self.parts(state, batch, counts, frozen), pipeline.batch_only_axes())
        log_idle_overlap(pipeline.runtime)
        return self.found(results, state.parameters, frozen)

    def _by_cached_gradients(
        self, objective: WholeBatch, state: State, batch: Batch, counts: Counts, frozen: Collection[str]
    ) -> tuple[Any, Sums]:
        """Gradients and sums, by the features of all microbatches, see `WholeBatch`."""
        pipeline = self.pipeline
        run = partial(objective.features, key=self._key(state), **self.references)
        features, _ = pipeline_forwards.values(pipeline, state.parameters, state.variables, batch, run)

        def linear(objective: Linearised, batch: Batch, counts: Counts) -> tuple[Any, Sums]:
            return replace(self, pipeline=replace(pipeline, objective=objective))(state, batch, counts, frozen)

        return by_cached_gradients(objective, features, batch, counts, linear)

    def _key(self, state: State) -> Array:
        return jax.random.fold_in(jax.random.key(self.seed), state.step)

    def slot_bytes(self, table: Table, state: State, batch: Batch, frozen: Collection[str]) -> SlotBytes:
        """What waits on a stage under a table of as many chunks; of arrays that are only described, while traced."""
        parts = self.parts(state, batch, self.counts(batch), frozen)
        return slot_bytes(table, parts, self.pipeline.batch_only_axes())

    def parts(self, state: State, batch: Batch, counts: Counts, frozen: Collection[str]) -> Parts:
        """What an executor runs for a batch that begins with this state."""
        pipeline, runtime = self.pipeline, self.pipeline.runtime
        parameters, variables, batch = all_there((state.parameters, state.variables, batch))
        values = flattened(parameters)
        still = {path: values.pop(path) for path in frozen}
        trained, outer = parted(values)
        fixed, around = parted({**still, **flattened(variables)})
        outer = with_deferred_gradients(runtime, to_device(outer))  # each microbatch needs them
        cut = pipeline.split(batch, partial(pipeline.objective.sums, key=self._key(state), **self.references), around)

        def last(outer: Any, x: Array, losses: Any, number: Array) -> tuple[Array, Sums]:
            sums = cut.last(outer, x, losses, number)
            return sum(means(sums.minimised, counts).values(), jnp.zeros(())), sums

        return pipeline.parts(cut, last, trained, fixed, outer, pipeline.reports)

    def found(self, results: Results, parameters: Any, frozen: Collection[str]) -> tuple[Any, Sums]:
        """An executor's results as gradients of the `parameters`, nested by path, under the `grads` rows; and sums."""
        values = flattened(parameters)
        zeros = {path: jnp.zeros(values[path].shape, values[path].dtype) for path in frozen}
        gradients = nested(joined(results.trained) | results.outer | zeros)
        of_blocks = joined(results.statistics) | joined(results.reports)
        sums = replace(results.sums, statistics=results.sums.statistics | of_blocks)
        return self.pipeline.runtime.reshard(gradients, "grads", axes.reduce_gradient), sums
