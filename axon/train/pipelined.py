"""Gradients of an objective by a pipeline: the blocks on the stages, what is around them shared by all stages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.errors import UserError
from axon.layout import LayoutError
from axon.nn import Auxiliary, Inputs, LanguageModel
from axon.nn.flops import forward_flops
from axon.parallel.pipeline import OneFOneB, Table, check, figures, lockstep
from axon.parallel.pipeline.execute import PIPE, Parts, execute
from axon.parallel.pipeline.partition import NOTHING, Partition, padding, partition
from axon.runtime import Runtime, flattened, nested
from axon.train.gradients import Counts, log_idle_overlap, microbatches, total_counts, with_deferred_gradients
from axon.train.objective import Batch, Objective, Sums, means
from axon.train.state import State

LAYERS = "layers/"
"""Where the paths of a language model's blocks begin."""


@dataclass(frozen=True)
class PipelinedGradients:
    """Gradients of `objective`, by the schedule of the runtime's layout; `seed` as of `axon.train.gradients.Gradients`.

    `seq`: positions of a sequence, for which blocks count their FLOPs: the model is cut so that a tick has the fewest.

    The objective's sums of a microbatch are cut in two at the model's depth: what comes before it, and what comes
    after. Both are of any objective that calls the model once; the blocks in between run on their stages. Blocks that
    give neither auxiliary losses nor statistics are taken to treat each sequence by itself: a device runs them on its
    own sequences, and has a sum of gradients of its own until the last microbatch.

    Raises `UserError` for a model, or a layout, that has no pipeline.
    """

    runtime: Runtime
    objective: Objective
    seed: int
    seq: int

    def __post_init__(self):
        module, layout = self.runtime.module, self.runtime.layout
        if not isinstance(module, LanguageModel):
            raise UserError(
                f"a pipeline's stages have the blocks of an axon.nn.LanguageModel, and build() gives a "
                f"{type(module).__name__}. Take the mesh axis {PIPE!r} out of Layout.mesh"
            )
        if layout.auto:
            raise LayoutError(
                f"Layout.auto = True: a pipeline needs explicit mesh axes. Set it to False, or take {PIPE!r} out of "
                "Layout.mesh"
            )
        _ = self.table

    @cached_property
    def table(self) -> Table:
        """The table that runs: that of the layout's schedule, in lockstep."""
        layout = self.runtime.layout
        schedule = OneFOneB() if layout.schedule is None else layout.schedule
        table = schedule.table(self.runtime.placement.mesh.shape[PIPE], layout.microbatches)
        if not table.flush:
            raise UserError(
                f"Layout.schedule: {type(schedule).__name__} has no flush between batches, which cannot be run yet. "
                "Use another schedule, as @OneFOneB()"
            )
        check(table)
        table = lockstep(table)
        check(table)
        return table

    @cached_property
    def partition(self) -> list[Partition]:
        """Of each segment of the model, the periods that each chunk runs."""
        depth = self.runtime.module.layers
        costs = [sum(forward_flops(depth.blocks[kind], self.seq) for kind in span.kinds) for span in depth.spans]
        return partition([span.times for span in depth.spans], costs, self.table.chunks.total)

    def counts(self, batch: Batch) -> Counts:
        return total_counts(self.objective, batch, self.runtime.layout.microbatches)

    def __call__(self, state: State, batch: Batch, counts: Counts, frozen: Collection[str] = ()) -> tuple[Any, Sums]:
        values = flattened(state.parameters)
        still = {path: values.pop(path) for path in frozen}
        trained, outer = _parted(values)
        cut = _Cut(self, state, microbatches(batch, self.runtime.layout.microbatches), counts, still)
        apart = self._apart()
        parts = Parts(
            first=cut.first,
            chunk=cut.chunk,
            last=cut.last,
            trained=cut.by_segment(trained),
            fixed=cut.by_segment(cut.fixed),
            outer=with_deferred_gradients(self.runtime, outer),
            inputs=cut.inputs(outer),
            partition=self.partition,
        )
        self._log()
        gradients, of_outer, sums, statistics = execute(self.table, parts, apart)
        log_idle_overlap(self.runtime)
        zeros = {path: jnp.zeros(value.shape, value.dtype) for path, value in still.items()}
        gradients = nested(_joined(gradients) | of_outer | zeros)
        return self.runtime.reshard(gradients, "grads", axes.reduce_gradient), replace(
            sums, statistics=sums.statistics | _joined(statistics)
        )

    def _apart(self) -> tuple[str, ...]:
        """The mesh axes that split the batch and nothing else of the blocks."""
        placement = self.runtime.placement
        names = {
            name for path, spec in self.runtime.parameters.items() if path.startswith(LAYERS) for name in spec.axes
        }
        used = {a for name in names for kind in ("activations", "params") for a in placement.mesh_axes(name, kind)}
        used |= {a for name in ("seq", "seq.residual", "kv_seq") for a in placement.mesh_axes(name)}
        return tuple(a for a in placement.mesh_axes("batch") if a not in used)

    def _log(self) -> None:
        table, layout = self.table, self.runtime.layout
        name = type(layout.schedule or OneFOneB()).__name__
        found = figures(table)
        bubble = found.lockstep / found.busy.max() - 1
        text = f"{name} in lockstep: {table.stages} stages, {table.microbatches} microbatches, bubble {bubble:.0%}"
        if table.chunks.virtual > 1:
            text += f"; {table.chunks.virtual} chunks a stage, to which layers are moved in each step"
        if table.microbatches < table.stages:
            text += f"; with fewer microbatches than stages {table.stages - table.microbatches} are always idle"
        axes.log_choice("pipeline", text)


class _Cut:
    """An objective's sums of a microbatch as what comes before a model's blocks, these, and what comes after."""

    def __init__(
        self, gradients: PipelinedGradients, state: State, parts: Batch, counts: Counts, frozen: Mapping[str, Array]
    ):
        self.runtime, self.objective, self.parts, self.counts = gradients.runtime, gradients.objective, parts, counts
        self.key = jax.random.fold_in(jax.random.key(gradients.seed), state.step)
        self.fixed, self.still = _parted({**frozen, **flattened(state.variables)})
        self.whole = [not padding(of_segment) for of_segment in gradients.partition]

    def first(self, outer: Mapping[str, Array], number: Array) -> Array:
        """The stream before the first block."""
        return self._before(outer, self._microbatch(number))[0]

    def inputs(self, outer: Mapping[str, Array]) -> Inputs:
        """What the blocks are given, of every microbatch."""
        return jax.lax.map(lambda part: self._before(outer, part)[1], self.parts)

    def by_segment(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Path → value of the blocks, for each segment of the model."""
        return [
            {path: value for path, value in values.items() if path.removeprefix(LAYERS).split("/")[0] in span.kinds}
            for span in self.runtime.module.layers.spans
        ]

    def chunk(
        self,
        trained: Sequence[Mapping[str, Array]],
        fixed: Sequence[Mapping[str, Array]],
        periods: Sequence[Array],
        x: Array,
        inputs: Inputs,
    ) -> tuple[Array, Any, Any]:
        """Some blocks, their auxiliary losses and their statistics."""
        module = self._bound({**_joined(trained), **_joined(fixed)})
        present = [None if whole else one != NOTHING for one, whole in zip(periods, self.whole, strict=True)]
        x, auxiliary = module.layers.part(x, inputs, periods, present)
        statistics = auxiliary.within(LAYERS.rstrip("/")).statistics
        return x, auxiliary.losses, self.by_segment(statistics)

    def last(self, outer: Mapping[str, Array], x: Array, losses: Any, number: Array) -> tuple[Array, Sums]:
        """What is minimised, of a microbatch, and its sums."""
        module = self._bound({**outer, **self.still})
        calls = []

        def depth(own: Array, inputs: Inputs, cache: Any = None) -> tuple[Array, None, Auxiliary]:
            calls.append(own)
            return x, None, Auxiliary(losses)

        module.layers = depth
        sums = self.objective.sums(module, self._microbatch(number), self.key)
        if len(calls) != 1:
            raise UserError(
                f"{type(self.objective).__name__} calls the model {len(calls)} times for a batch, and a pipeline runs "
                f"it once. Take the mesh axis {PIPE!r} out of Layout.mesh"
            )
        return sum(means(sums.minimised, self.counts).values(), jnp.zeros(())), sums

    def _before(self, outer: Mapping[str, Array], part: Batch) -> tuple[Array, Inputs]:
        """The stream before the first block, and what blocks are given besides."""
        module = self._bound({**outer, **self.still})
        module.layers = _stop
        try:
            self.objective.sums(module, part, self.key)
        except _Reached as reached:
            return reached.x, reached.inputs
        raise UserError(
            f"{type(self.objective).__name__} does not call the model's blocks: there is nothing to pipeline"
        )

    def _microbatch(self, number: Array) -> Batch:
        return {name: jax.lax.dynamic_index_in_dim(x, number, keepdims=False) for name, x in self.parts.items()}

    def _bound(self, values: Mapping[str, Any]) -> Any:
        """The module with these values; those that it does not need are only described."""
        described = {**self.runtime.parameters, **self.runtime.variables}
        return self.runtime.bind(nested({**described, **values}))


class _Reached(Exception):
    """The model's depth was called: what comes before it is known."""

    def __init__(self, x: Array, inputs: Inputs):
        self.x, self.inputs = x, inputs


def _stop(x: Array, inputs: Inputs, cache: Any = None) -> Any:
    raise _Reached(x, inputs)


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Path → value, of all segments."""
    return {path: value for of_segment in parts for path, value in of_segment.items()}


def _parted(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Path → value, of the blocks, and of all else."""
    blocks = {path: value for path, value in values.items() if path.startswith(LAYERS)}
    return blocks, {path: value for path, value in values.items() if path not in blocks}
