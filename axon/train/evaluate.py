"""Evaluation of an objective: its sums over a batch, without gradients and without an optimizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from axon import axes
from axon.axes import ArraySpec, axes_used, parse_names
from axon.errors import UserError
from axon.layout import validate
from axon.nn.auxiliary import Auxiliary
from axon.nn.capabilities import HasDims
from axon.nn.language_model import RESIDUAL
from axon.parallel.pipeline.execute import PIPE
from axon.runtime import Runtime, nested
from axon.train import feed, pipeline_forwards
from axon.train.objective import SEQUENCES, Batch, Objective, Sums
from axon.train.pipeline import Pipeline
from axon.train.references import References, Values

BATCH = ("batch", "seq")


@dataclass(frozen=True)
class Evaluator:
    """Evaluates `objective` on batches of `batch` sequences of `seq` positions, with a runtime."""

    runtime: Runtime
    objective: Objective
    batch: int
    seq: int
    references: References = field(default_factory=References)

    @property
    def unit(self) -> str:
        """What the objective's loss is a mean over, see `Objective`."""
        return self.objective.unit

    def check_layout(self) -> None:
        """Raise `LayoutError` unless the runtime's layout can shard the parameters, the arrays of a batch, and the
        stream between blocks of a module that has one, whose width is `dims["embed"]`."""
        runtime, shape = self.runtime, (self.batch, self.seq)
        width = runtime.module.dims.get("embed") if isinstance(runtime.module, HasDims) else None
        activations = {f"the batch's {name}": spec for name, spec in self.specs.items()}
        if width is not None:
            activations["the residual stream"] = ArraySpec(parse_names(RESIDUAL), (*shape, width))
        self.objective.check_references(runtime.module, self.references.modules)
        for one in self.references.runtimes.values():
            validate(one.placement, one.parameters, ArraySpec(BATCH, shape), {}, self.axes_used)
        validate(runtime.placement, runtime.parameters, ArraySpec(BATCH, shape), activations, self.axes_used)

    def axes_used(self) -> frozenset[str]:
        """The axes of parameters and batch, and all that the module's patterns name: it is traced to see them."""
        runtime = self.runtime

        def sums(values: Any, variables: Any, batch: Batch, references: Values) -> Any:
            key, module = jax.random.key(0), runtime.bind(values, variables)
            frozen = self.references.bound(references, values, variables)
            drawn = self.objective.with_references(self.drawn(batch, key), frozen)
            return self.objective.sums(module, drawn, key, **frozen)

        parts = nested(runtime.parameters), nested(runtime.variables), self.specs, self.references.specs
        declared = jax.tree.leaves((*parts[:2], parts[3]))
        abstract = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.logical_shape, spec.dtype), parts)
        return axes_used(sums, *abstract) | {name for spec in declared for name in spec.axes} | set(BATCH)

    def __call__(self, parameters: Any, batch: Batch, variables: Any = None) -> dict[str, tuple[Array, Array]]:
        """Name of each metric → (sum, count) over a batch: `loss` in nats, and its tokens."""
        with self.runtime.tracing():
            return self._compiled(parameters, variables or {}, batch, self.references.given)

    @cached_property
    def _compiled(self) -> Any:
        def evaluate(
            parameters: Any, variables: Any, batch: Batch, references: Values
        ) -> dict[str, tuple[Array, Array]]:
            values = references, parameters, variables
            batch = self.with_references(self.drawn(batch, jax.random.key(0)), *values)
            sums = self._sums(parameters, variables, batch, self.frozen(*values))
            counts = self.objective.counts(batch)
            return {name: (value, counts.get(name, counts["tokens"])) for name, value in sums.metrics.items()}

        return self.runtime.jit(evaluate)

    def drawn(self, batch: Batch, key: Array) -> Batch:
        """A batch with the numbers of its sequences, and with what the objective draws of it."""
        batch = {**batch, SEQUENCES: axes.shard(jnp.arange(self.batch, dtype=jnp.int32), "batch")}
        return self.objective.draw(self.runtime.module, batch, key)

    def frozen(self, references: Values, parameters: Any, variables: Any) -> dict[str, Any]:
        """Name → the frozen module with its arrays; on stages without blocks, as `with_references` has run these."""
        frozen = self.references.bound(references, parameters, variables)
        for name, module in frozen.items() if self.pipeline is not None else ():
            module.layers = partial(_not_called, type(self.objective).__name__, name)
        return frozen

    def with_references(self, batch: Batch, references: Values, parameters: Any, variables: Any) -> Batch:
        """On stages, a batch with what frozen models say of it, by forwards alone; else as it is: that of each part is
        computed with its sums."""
        named = self.references.arrays(references, parameters, variables)
        for name, pipeline in self.frozen_pipelines.items():

            def run(module: Any, part: Batch, name: str = name) -> tuple[dict[str, Any], Auxiliary]:
                return {name: self.objective.reference_values(name, module, part)}, Auxiliary()

            own = named[name]["parameters"], named[name]["variables"]
            values, _ = pipeline_forwards.values(pipeline, *own, batch, run, f"forwards of {name!r}")
            batch = {**batch, **values}
        return batch

    def _sums(self, parameters: Any, variables: Any, batch: Batch, frozen: dict[str, Any]) -> Sums:
        if self.pipeline is not None:
            return pipeline_forwards.sums(self.pipeline, parameters, variables, batch, frozen)
        batch = self.objective.with_references(batch, frozen)
        return self.objective.sums(self.runtime.bind(parameters, variables), batch, **frozen)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """What runs the objective, where the mesh has stages. Raises `UserError` for a model that cannot run so."""
        if self.runtime.placement.mesh.shape.get(PIPE, 1) == 1:
            return None
        return Pipeline(self.runtime, self.objective, self.seq)

    @cached_property
    def frozen_pipelines(self) -> dict[str, Pipeline]:
        """Name → the pipeline of each frozen model of the objective, where the mesh has stages. Raises `UserError` for
        one that cannot run so."""
        names = sorted(self.references.of_objective) if self.pipeline is not None else ()
        return {name: self._frozen_pipeline(name) for name in names}

    def _frozen_pipeline(self, name: str) -> Pipeline:
        try:
            return Pipeline(self.references.runtime(name), self.objective, self.seq)
        except UserError as error:
            raise type(error)(f"the frozen model {name!r}: {error}") from error

    def place(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """The sequences of this process of the global batch (`host_sequences`), as sharded global arrays.

        Each is placed by the axes that the objective's `specs` give the array of its name. Positions are in the order
        in which the layout stores them (`Placement.stored_positions`).
        """
        placement, specs = self.runtime.placement, self.specs
        self._check_used(batch)
        if placement.ring:
            stored = placement.stored_positions(self.seq)
            batch = {n: value[:, stored] if specs[n].axes[:2] == BATCH else value for n, value in batch.items()}
        shardings = {name: self._shardings[name] for name in batch}
        return feed.place(shardings, dict(batch), self.host_sequences, self.batch)

    def check_arrays(self, arrays: Mapping[str, str]) -> None:
        """Raise `UserError` unless batches of these arrays, name → axes, are the objective's."""
        self._check_used(arrays)
        own = self.specs.keys() - self.objective.derived
        axes = {name: " ".join(spec.axes) for name, spec in self.specs.items() if name in own}
        if wrong := next((name for name in axes if arrays.get(name) != axes[name]), None):
            has = f"has it as '{arrays[wrong]}'" if wrong in arrays else f"has {', '.join(arrays)} alone"
            raise UserError(
                f"{type(self.objective).__name__} needs the array {wrong!r} of a batch, as '{axes[wrong]}', and "
                f"Train.data {has}: set Train.data to a feed that makes it, or Train.objective to one for this data"
            )

    def _check_used(self, names: Iterable[str]) -> None:
        if strange := sorted(set(names) - self.specs.keys()):
            raise UserError(
                f"{type(self.objective).__name__} has no use for {', '.join(strange)}: its batch is of "
                f"{', '.join(self.specs)}. Set Train.objective to one for this data"
            )

    @cached_property
    def _shardings(self) -> dict[str, NamedSharding]:
        return {name: self.runtime.placement.sharding(spec.axes) for name, spec in self.specs.items()}

    @cached_property
    def host_sequences(self) -> np.ndarray:
        """Numbers of the sequences of the global batch that this process reads: all of them in a run of one process."""
        return feed.host_sequences(self.runtime.placement.sharding(BATCH[:1]), self.batch)

    @cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a global batch."""
        return self.runtime.abstract(self.specs)

    @cached_property
    def specs(self) -> dict[str, ArraySpec]:
        """The arrays of a global batch."""
        return dict(self.objective.specs(self.batch, self.seq))


def _not_called(objective: str, name: str, *arguments: Any) -> Any:
    """In place of a frozen model's blocks."""
    raise UserError(
        f"{objective} calls the frozen model {name!r} in `sums`, and on the stages of a pipeline its blocks run "
        f"before: let `reference_values` give what is needed of it, or take the mesh axis {PIPE!r} out of Layout.mesh"
    )
