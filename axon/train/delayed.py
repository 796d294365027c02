"""Training by a pipeline without a flush: a step begins its batch, and finishes the one before.

PipeDream-2BW, Narayanan et al., arXiv:2006.09503, section 3.1: `W(t+1) = W(t) − lr · update(∇f(W(t−1)))`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.axes import ArraySpec, parse_names
from axon.nn.language_model import RESIDUAL
from axon.parallel.pipeline import Table
from axon.parallel.pipeline.execute import execute_period, in_flight
from axon.parallel.pipeline.text import write
from axon.runtime import Runtime, flattened, nested
from axon.train.evaluate import BATCH, Evaluator
from axon.train.gradients import GradientMethod, log_idle_overlap
from axon.train.objective import SEQUENCES, Batch, Sums, paired
from axon.train.optimizers import Parameters
from axon.train.pipeline_split import LAYERS, joined
from axon.train.pipelined import PipelinedGradients
from axon.train.references import Values
from axon.train.state import State
from axon.train.update import Descent, Metrics, Update, clipped, metrics


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InFlight:
    """The batch that a step began, for the next one to finish.

    Args:
        pending: 1, or 0 where there is no such batch, as before a run's first step. batch: its arrays.
        parameters, variables: those that it began with; of the parameters those that are trained.
        gradients, sums: what was added up over those microbatches that are done. memory: the stages' slots.
    """

    pending: Any
    batch: dict[str, Any]
    parameters: dict[str, Any]
    variables: dict[str, Any]
    gradients: dict[str, Any]
    sums: Any
    memory: Any


@dataclass(frozen=True)
class Delayed(Update):
    """Descent along the gradients of the batch before, which this step finishes with the weights that it began with.

    Where nothing is in flight a step changes no parameter, no optimizer state and no variable (see `commit`), and its
    metrics are 0. Metrics are those of the batch that is finished, its learning rate among them.

    Args:
        gradients: a pipeline's, whose table has no flush. evaluator: what draws of a batch what the objective draws.
    """

    descent: Descent
    gradients: PipelinedGradients
    evaluator: Evaluator

    @property
    def runtime(self) -> Runtime:
        return self.descent.runtime

    def specs(self, parameters: Parameters) -> Any:
        return self.descent.specs(parameters)

    def init(self, values: Any) -> Any:
        return self.descent.init(values)

    def evaluated(self, state: State) -> Any:
        return self.descent.evaluated(state)

    # ---- what is in flight ----------------------------------------------------------------------------------------

    @cached_property
    def in_flight(self) -> InFlight:
        """What is in flight in axes: an `ArraySpec` at each leaf."""
        parameters, variables = self._trained(self.runtime.parameters), self.runtime.variables
        memory, sums, statistics, reports = self._shapes
        sums = replace(sums, statistics=sums.statistics | joined(statistics) | joined(reports))
        return InFlight(
            pending=ArraySpec((), (), jnp.int32),
            batch=self._batch,
            parameters=nested(parameters),
            variables=nested(variables),
            gradients=nested({path: replace(spec, kind="grads") for path, spec in parameters.items()}),
            sums=replace(
                jax.tree.map(_unsplit, sums),
                statistics={path: _statistic(path, shape) for path, shape in sums.statistics.items()},
            ),
            memory=jax.tree.map(_slots, memory),
        )

    def empty(self, parameters: Any, variables: Any) -> InFlight:
        """What is in flight before the first step: nothing."""
        zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), self.in_flight)
        return replace(zeros, parameters=nested(self._trained(flattened(parameters))), variables=variables)

    @cached_property
    def identity(self) -> str:
        """The same for all runs that can go on with what this one has in flight."""
        leaves = jax.tree_util.tree_leaves_with_path(self.in_flight)
        shapes = [(jax.tree_util.keystr(path), spec.shape, jnp.dtype(spec.dtype).name) for path, spec in leaves]
        return hashlib.sha256(f"{write(self.table)} {shapes}".encode()).hexdigest()

    @property
    def table(self) -> Table:
        return self.gradients.pipeline.table

    @cached_property
    def _batch(self) -> dict[str, ArraySpec]:
        """The arrays of a batch, with what the objective draws of it and what frozen models say."""
        runtime, declared = self.runtime, self.evaluator.specs

        def drawn_beside(batch: Batch, *values: Any) -> Batch:
            return self.evaluator.with_references(self.evaluator.drawn(batch, jax.random.key(0)), *values)

        with runtime.tracing():
            drawn = jax.eval_shape(drawn_beside, runtime.abstract(declared), *self._values)
        unchanged = {name for name, spec in declared.items() if name in drawn and drawn[name].shape == spec.shape}
        new = {name: self._drawn(shape) for name, shape in drawn.items() if name not in {SEQUENCES, *unchanged}}
        return {name: declared[name] for name in unchanged} | new

    def _drawn(self, shape: Any) -> ArraySpec:
        """An array of each sequence, or of each of its positions."""
        positions = shape.shape[:2] == (self.evaluator.batch, self.evaluator.seq)
        known = BATCH if positions else BATCH[:1]
        return ArraySpec((*known, *_unnamed(shape.shape[len(known) :])), shape.shape, shape.dtype)

    @cached_property
    def _shapes(self) -> tuple[Any, Any, Any, Any]:
        """Memory, sums, and statistics and reports of the blocks of each segment."""
        runtime = self.runtime

        def shapes(batch: Batch, references: Values, parameters: Any, variables: Any) -> Any:
            batch = {**batch, SEQUENCES: axes.shard(jnp.arange(self.evaluator.batch, dtype=jnp.int32), "batch")}
            state = State(jnp.zeros((), jnp.int32), parameters, None, variables)
            bound = self.evaluator.frozen(references, parameters, variables)
            method = replace(self.gradients, references=bound)
            return in_flight(self.table, method.parts(state, batch, method.counts(batch), self.descent.frozen))

        with runtime.tracing():
            return jax.eval_shape(shapes, runtime.abstract(self._batch), *self._values)

    @property
    def _values(self) -> tuple[Any, Any, Any]:
        """The arrays of the frozen models, parameters and variables: shapes, dtypes and shardings."""
        runtime = self.runtime
        own = map(runtime.abstract, (nested(runtime.parameters), nested(runtime.variables)))
        return self.evaluator.references.abstract, *own

    def _trained(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in values.items() if path not in self.descent.frozen}

    # ---- the step -------------------------------------------------------------------------------------------------

    def step(self, gradients: GradientMethod, state: State, batch: Batch) -> tuple[State, Metrics, Mapping[str, Array]]:
        before = state.in_flight
        earlier: Batch = {**before.batch, SEQUENCES: batch[SEQUENCES]}
        counts = gradients.counts(earlier)
        assert isinstance(gradients, PipelinedGradients)
        found, sums, left = self._period(gradients, state, batch, earlier)
        found, norms = clipped(found, self.descent.optimizer.clip)
        reported = metrics(self.descent.rate(state), sums, counts, norms)
        after = replace(self.descent.applied(state, found), in_flight=left)
        return after, jax.tree.map(lambda x: jnp.where(before.pending, x, 0), reported), sums.statistics

    def commit(self, before: State, after: State) -> State:
        """The state after a step, in which nothing has changed if no batch was finished: but for what is in flight."""
        pending = before.in_flight.pending
        kept = replace(before, step=after.step, in_flight=after.in_flight)
        return jax.tree.map(lambda new, old: new if new is old else jnp.where(pending, new, old), after, kept)

    def _period(
        self, method: PipelinedGradients, state: State, batch: Batch, earlier: Batch
    ) -> tuple[Any, Sums, InFlight]:
        """Gradients and sums of the batch before, and what is in flight of this one."""
        before, frozen = state.in_flight, self.descent.frozen
        values = nested(flattened(state.parameters) | flattened(before.parameters))
        began = replace(_earlier(state), parameters=values, variables=before.variables)
        method.pipeline.log("pipeline", self.table)
        begun, finished, memory = execute_period(
            self.table,
            method.parts(state, batch, method.counts(batch), frozen),
            method.parts(began, earlier, method.counts(earlier), frozen),
            before.memory,
            method.pipeline.batch_only_axes(),
        )
        log_idle_overlap(self.runtime)
        first, first_sums = method.found(begun, state.parameters, frozen)
        last, last_sums = method.found(finished, state.parameters, frozen)
        last, first = flattened(last), self._trained(flattened(first))
        rest = jax.tree.map(jnp.add, self._trained(last), flattened(before.gradients))
        left = InFlight(
            pending=jnp.ones_like(before.pending),
            batch={name: batch[name] for name in before.batch},
            parameters=nested(self._trained(flattened(state.parameters))),
            variables=state.variables,
            gradients=nested(first),
            sums=first_sums,
            memory=memory,
        )
        sums = paired(self.runtime.variables, last_sums, before.sums)
        return nested(last | rest), sums, self._placed(left)

    def _placed(self, left: InFlight) -> InFlight:
        placement = self.runtime.placement
        return jax.tree.map(lambda s, x: axes.reshard(x, placement.spec(s.axes, s.kind)), self.in_flight, left)


def _earlier(state: State) -> State:
    """The state's step as that of the batch before."""
    return replace(state, step=state.step - 1)


def _unsplit(shape: Any) -> ArraySpec:
    return ArraySpec(_unnamed(shape.shape), shape.shape, shape.dtype)


def _statistic(path: str, shape: Any) -> ArraySpec:
    """Of the blocks, with an axis `layers` in front."""
    if not path.startswith(LAYERS):
        return _unsplit(shape)
    return ArraySpec(("layers", *_unnamed(shape.shape[1:])), shape.shape, shape.dtype, "params")


def _slots(shape: Any) -> ArraySpec:
    """An axis for the stages comes first, and `RESIDUAL` last; or nothing, for what else goes from chunk to chunk."""
    residual = parse_names(RESIDUAL)
    last = residual if len(shape.shape) > len(residual) else ()
    between = _unnamed(shape.shape[1 : len(shape.shape) - len(last)])
    return ArraySpec(("layers", *between, *last), shape.shape, shape.dtype)


def _unnamed(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Names of axes that are never split."""
    return tuple(f"_{number}" for number in range(len(shape)))
