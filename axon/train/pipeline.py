"""A model on the stages of a pipeline: its depth cut, and the table that runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import jax
from jax import Array

from axon import axes
from axon.composition import HOST, LATE, LOSS_SCALE, REPLICAS, ROLLS_BACK, STAGES, Part
from axon.errors import UserError
from axon.layout import LayoutError
from axon.layout.table import Schedule
from axon.nn import LanguageModel
from axon.nn.flops import forward_flops
from axon.parallel.pipeline import OneFOneB, Table, check, figures, lockstep
from axon.parallel.pipeline.execute import PIPE, Parts
from axon.parallel.pipeline.partition import Partition, padding, partition, width
from axon.runtime import Runtime
from axon.train.gradients import Counts, microbatches, total_counts
from axon.train.objective import Batch, Objective, paired
from axon.train.pipeline_split import LAYERS, PipelineSplit

MOST_CELLS = 2**18
"""Pieces of work in a pipeline's table at most: all of them are in the compiled program."""


@dataclass(frozen=True)
class Pipeline:
    """`objective` on the stages of a pipeline, by the schedule of the runtime's layout.

    The objective's sums of a microbatch are cut in two at the model's depth (see `PipelineSplit`); the blocks in
    between run on their stages. `seq`: positions of a sequence, for which blocks count their FLOPs: the model is cut so
    that a tick has the fewest.

    Raises `UserError` for a model, or a layout, that has no pipeline.
    """

    runtime: Runtime
    objective: Objective
    seq: int

    def __post_init__(self):
        module, layout = self.runtime.module, self.runtime.layout
        if not isinstance(module, LanguageModel):
            raise UserError(
                f"a pipeline's stages have the blocks of an axon.nn.LanguageModel, and build() gives a "
                f"{type(module).__name__}. Take the mesh axis {PIPE!r} out of Layout.mesh"
            )
        if not self.runtime.placement.mesh_axes("layers", "params"):
            raise LayoutError(
                f"Layout: no mesh axis splits 'layers' of stored parameters, and along {PIPE!r} are stages, each with "
                f"its own layers. Take the row of 'layers' out of Layout.rows and Layout.params, or {PIPE!r} out of "
                "Layout.mesh"
            )
        if layout.auto:
            raise LayoutError(
                f"Layout.auto = True: a pipeline needs explicit mesh axes. Set it to False, or take {PIPE!r} out of "
                "Layout.mesh"
            )
        _ = self.partition, self.reports

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        stages = Part(f"stages along {PIPE!r}", f"take {PIPE!r} out of Layout.mesh", frozenset({STAGES}))
        if self.table.flush:
            return (stages,)
        excludes = {
            HOST: "without a flush there are two versions of the weights, which cannot be streamed from the host yet",
            REPLICAS: "without a flush a batch would be in flight on each replica, with weights of its own",
            ROLLS_BACK: "without a flush a checkpoint has a batch in flight, which a rollback could not leave out",
            LOSS_SCALE: "without a flush the gradients of a batch are made under two scales",
        }
        name = f"Layout.schedule = {type(self.schedule).__name__}"
        return stages, Part(name, "use a schedule with a flush, as OneFOneB", frozenset({LATE}), excludes)

    @property
    def schedule(self) -> Schedule:
        """The layout's; 1F1B where it names none."""
        schedule = self.runtime.layout.schedule
        return OneFOneB() if schedule is None else schedule

    @cached_property
    def table(self) -> Table:
        """The table that runs: that of the layout's schedule, in lockstep."""
        stages, microbatches = self.runtime.placement.mesh.shape[PIPE], self.runtime.layout.microbatches
        if (cells := 2 * stages * self.schedule.virtual * microbatches) > MOST_CELLS:
            raise LayoutError(
                f"Layout.microbatches = {microbatches}: with {stages} stages of {self.schedule.virtual} chunks the "
                f"schedule is a table of {cells:,} pieces of work; at most {MOST_CELLS:,} can be checked and run"
            )
        table = self.schedule.table(stages, microbatches)
        check(table)
        table = lockstep(table)
        check(table)
        return table

    @cached_property
    def partition(self) -> list[Partition]:
        """Of each segment of the model, the periods that each chunk runs."""
        chunks = self.table.chunks.total
        cut = self.cut(chunks)
        if not self.runtime.layout.pad_layers and (share := self.idle_share(cut)):
            times = [span.times for span in self.runtime.module.layers.spans]
            raise LayoutError(
                f"this model's depth, of {' and '.join(map(str, times))} periods, cannot be cut into {chunks} equal "
                f"chunks: all run the same program, with places for layers that some of them do not have, "
                f"{share:.1%} of the blocks' time. Accept it with Layout.pad_layers = True, or choose another size of "
                f"the mesh axis {PIPE!r}"
            )
        return cut

    def cut(self, chunks: int) -> list[Partition]:
        """The partition into so many chunks for which a tick costs least."""
        return partition([span.times for span in self.runtime.module.layers.spans], self._costs, chunks)

    @property
    def _costs(self) -> list[int]:
        """Forward FLOPs of a token in a period of each segment."""
        depth = self.runtime.module.layers
        return [sum(forward_flops(depth.blocks[kind], self.seq) for kind in span.kinds) for span in depth.spans]

    def idle_share(self, cut: list[Partition]) -> float:
        """How much of the blocks' time is spent in places that no layer takes."""
        places = sum(len(one) * width(one) * cost for one, cost in zip(cut, self._costs, strict=True))
        return sum(padding(one) * cost for one, cost in zip(cut, self._costs, strict=True)) / places

    def batch_only_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the batch and nothing else of the blocks; none where each replica has stages of its
        own: XLA has no sum that is still to be made over one axis of a mesh of which another is manual."""
        placement = self.runtime.placement
        if jax.sharding.get_abstract_mesh().manual_axes:
            return ()
        names = {
            name for path, spec in self.runtime.parameters.items() if path.startswith(LAYERS) for name in spec.axes
        }
        used = {a for name in names for kind in ("activations", "params") for a in placement.mesh_axes(name, kind)}
        used |= {a for name in ("seq", "seq.residual", "kv_seq") for a in placement.mesh_axes(name)}
        return tuple(a for a in placement.mesh_axes("batch") if a not in used)

    def microbatches(self, batch: Batch) -> Batch:
        """`batch …` → `micro batch …`."""
        return microbatches(batch, self.runtime.layout.microbatches)

    def counts(self, batch: Batch) -> Counts:
        """The divisors of the sums over a batch, added up over its microbatches."""
        return total_counts(self.objective, batch, self.runtime.layout.microbatches)

    def split(self, batch: Batch, run: Callable[[Any, Batch], Any], fixed: Mapping[str, Any]) -> PipelineSplit:
        """A function of the model and a microbatch, cut at the depth."""
        name = type(self.objective).__name__
        return PipelineSplit(self.runtime, self.partition, self.microbatches(batch), run, name, fixed)

    @cached_property
    def reports(self) -> dict[str, tuple[int, ...]]:
        """Path → shape, of each variable of the blocks whose statistic operations report."""
        variables = self.runtime.variables.items()
        reported = {path: spec.reported for path, spec in variables if spec.reported is not None}
        if around := [path for path in reported if not path.startswith(LAYERS)]:
            raise UserError(
                f"{around[0]} records what an operation outside of the blocks reports, and a pipeline has the reports "
                f"of its stages alone. Take it out of Train.transforms, or {PIPE!r} out of Layout.mesh"
            )
        return reported

    def parts(
        self,
        cut: PipelineSplit,
        last: Callable[[Any, Array, Any, Array], tuple[Any, Any]],
        trained: Mapping[str, Any],
        fixed: Mapping[str, Any],
        outer: Any,
        reports: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> Parts:
        """What an executor runs: gradients are made for what is `trained` and `outer`, by path, and `reports`. `last`
        is as of `Parts`."""
        return Parts(
            first=cut.first,
            chunk=cut.chunk,
            last=last,
            trained=cut.by_segment(trained),
            fixed=cut.by_segment(fixed),
            outer=outer,
            inputs=cut.inputs(outer),
            partition=self.partition,
            reports=cut.by_segment(reports),
            pair=self._pair,
            pair_sums=partial(paired, self.runtime.variables),
        )

    def _pair(self, one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Any:
        """Two microbatches' statistics of the blocks of each segment, as one."""
        variables = self.runtime.variables
        return [
            {path: variables[path].reduction.pair(x, new[path]) for path, x in old.items()}
            for old, new in zip(one, other, strict=True)
        ]

    def log(self, topic: str, table: Table) -> None:
        """Leave word of what runs."""
        found, name = figures(table), type(self.schedule).__name__
        bubble = found.lockstep / found.busy.max() - 1
        text = f"{name} in lockstep: {table.stages} stages, {table.microbatches} microbatches, bubble {bubble:.0%}"
        if table.chunks.virtual > 1:
            text += f"; {table.chunks.virtual} chunks a stage, to which layers are moved in each step"
        if not table.flush:
            text += "; without a flush: gradients come one step late, with the weights of the step before"
        if share := self.idle_share(self.partition):
            text += f"; {share:.1%} of the blocks' time goes to places that no layer takes"
        if not table.flush and table.backwards:
            text += "; a backward runs its chunk again, since nothing but inputs waits for the next batch"
        if table.microbatches < table.stages:
            text += f"; with fewer microbatches than stages {table.stages - table.microbatches} are always idle"
        axes.log_choice(topic, text)
