"""Forwards of a pipeline alone: an objective's sums, and what a function says of each sequence of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.nn.auxiliary import Auxiliary
from axon.parallel.pipeline import forwards
from axon.parallel.pipeline.delivery import all_there
from axon.parallel.pipeline.execute import evaluate
from axon.parallel.pipeline.parts import Parts, added, zeros
from axon.parallel.pipeline.region import spec_of
from axon.runtime import flattened
from axon.train.gradients import from_microbatches
from axon.train.objective import Batch, Sums
from axon.train.pipeline import Pipeline
from axon.train.pipeline_split import PipelineSplit, parted
from axon.train.whole_batch import Features, WholeBatch


def sums(pipeline: Pipeline, parameters: Any, variables: Any, batch: Batch, references: Mapping[str, Any]) -> Sums:
    """The objective's sums over a batch, which has what frozen models say of it: by forwards alone, in
    microbatches. `references`: those models, without blocks."""
    objective = pipeline.objective
    if isinstance(objective, WholeBatch):
        run = partial(objective.features, **references)
        features, losses = values(pipeline, parameters, variables, batch, run)
        return objective.coupled(features, batch).with_auxiliary(Auxiliary(losses))
    run = partial(objective.sums, **references)
    cut, parts = _forwards(pipeline, parameters, variables, batch, run, "forwards")
    return evaluate(forwards(pipeline.table), parts(last=lambda *given: (None, cut.last(*given))))


def values(
    pipeline: Pipeline,
    parameters: Any,
    variables: Any,
    batch: Batch,
    run: Callable[[Any, Batch], tuple[Features, Auxiliary]],
    topic: str = "forwards",
) -> tuple[Features, dict[str, Array]]:
    """Of each sequence of a batch what `run(module, microbatch)` gives, which calls the module once: by name, the
    first axis of each `batch`; and the auxiliary losses. By forwards alone."""
    cut, parts = _forwards(pipeline, parameters, variables, batch, run, topic)

    def last(outer: Any, x: Array, losses: Any, number: Array) -> tuple[None, Any]:
        values, auxiliary = cut.last(outer, x, losses, number)
        return None, (number, values, auxiliary.losses)

    def pair(total: Any, found: Any) -> Any:
        number, values, losses = found
        placed = jax.tree.map(partial(_put, number), total[0], values)
        return placed, added(total[1], losses)

    def none(found: Any) -> Any:
        _, values, losses = found
        return jax.tree.map(partial(_room, pipeline.runtime.layout.microbatches), values), zeros(losses)

    own = replace(parts(last=last), pair_sums=pair, no_sums=none)
    placed, losses = evaluate(forwards(pipeline.table), own)
    return from_microbatches(placed), losses


def _forwards(
    pipeline: Pipeline, parameters: Any, variables: Any, batch: Batch, run: Callable[[Any, Batch], Any], topic: str
) -> tuple[PipelineSplit, Callable[..., Parts]]:
    """A function of the model and a microbatch, cut at the depth; and what makes with `last` the parts that run it."""
    parameters, variables, batch = all_there((parameters, variables, batch))
    blocks, outer = parted(flattened(parameters) | flattened(variables))
    cut = pipeline.split(batch, run, {})
    pipeline.log(topic, forwards(pipeline.table))
    return cut, partial(pipeline.parts, cut, trained={}, fixed=blocks, outer=outer)


def _room(number: int, x: Any) -> Array:
    """Zeros, with room for so many arrays like `x` along a new first axis."""
    return axes.reshard(jnp.zeros((number, *x.shape), x.dtype), PartitionSpec(None, *spec_of(x)))


def _put(place: Array, total: Array, x: Array) -> Array:
    """`total` with `x` at a place of its first axis."""
    return lax.dynamic_update_index_in_dim(total, x, place, 0)
