"""One training step: a pure function of a state and a batch, composed of objective, gradients and update."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.axes import ArraySpec, Execution
from axon.composition import check_composition, parts_of
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.nn.low_precision import with_recipe
from axon.nn.param import padded, with_zero_padding
from axon.nn.weight_transform import WeightTransform, adapter_names
from axon.parallel.outer import DiLoCo, SlowMo
from axon.parallel.pipeline.execute import PIPE
from axon.precision import Precision
from axon.runtime import Runtime, flattened, nested
from axon.train.by_adapter import ByAdapter, EachAdapter
from axon.train.check_parameters import check_parameters
from axon.train.delayed import Delayed
from axon.train.evaluate import Evaluator
from axon.train.faults import NO_LIMITS, Faults, Limits
from axon.train.gradients import GradientMethod, Gradients
from axon.train.loss_scale import LossScaled
from axon.train.objective import Batch, NextToken, Objective
from axon.train.on_disk import DiskDescent
from axon.train.onebit import OneBit
from axon.train.optimizers import OneBitAdam, Optimizer, frozen_paths, optimizer_parts
from axon.train.outer import Outer
from axon.train.pipelined import PipelinedGradients
from axon.train.references import References, Values
from axon.train.skipping import unless_faulty
from axon.train.state import State
from axon.train.update import Descent, Metrics, Update


class Program:
    """A model's training as compiled functions: `init`, `step`, `evaluate`.

    Args:
        model: a config that builds the module, as `models.llama.Llama`. layout: where each named axis lives.
        optimizer: how parameters are updated. outer: lets replicas train separately between outer steps; or None.
        batch, seq: shape of the global batch, in sequences and positions. objective: what is minimised.
        precision, execution, devices, placement, transforms: see `axon.runtime.Runtime`. seed: of initial values and
            dropout.
        faults: where one is to be skipped, the step takes `Limits`, and applies no update where they are exceeded or a
            number is not finite.
        references: name → the config of a frozen model, each of which the objective names, or the data
            (`data_references`); they get their arrays by `references.give`, before the first step.

    Raises `LayoutError`, before anything is traced, if the layout cannot shard the model, and `UserError` for parts
    that cannot be combined.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        optimizer: Optimizer | OneBitAdam,
        *,
        batch: int,
        seq: int,
        objective: Objective = NextToken(),
        outer: DiLoCo | SlowMo | None = None,
        precision: Precision = Precision(),
        seed: int = 0,
        execution: Execution = Execution(),
        devices: Sequence[Any] | None = None,
        placement: Placement | None = None,
        faults: Faults = Faults(),
        transforms: Sequence[WeightTransform] = (),
        references: Mapping[str, Any] = MappingProxyType({}),
        data_references: frozenset[str] = frozenset(),
    ):
        mesh = {"devices": devices, "placement": placement, "seq": seq}
        transforms = with_recipe(precision.recipe, transforms)
        adapters = adapter_names(transforms)
        minimised = ByAdapter.of(objective, adapters) if adapters else objective
        self.runtime = Runtime(model, layout, precision=precision, execution=execution, transforms=transforms, **mesh)
        precision.check_training(self.runtime.placement)
        minimised.check(self.runtime.module)
        self.batch, self.seq, self.seed, self.optimizer = batch, seq, seed, optimizer
        self.references = References.of(objective, references, self.runtime, seq, data_references)
        self.evaluator = Evaluator(self.runtime, minimised, batch, seq, self.references)
        self.evaluator.check_layout()
        self.gradients: Gradients | PipelinedGradients = _gradients(self.evaluator, seed)
        own = parts_of(objective, self.references, self.evaluator.pipeline, execution, outer, faults, *transforms)
        check_composition([*own, *parts_of(precision.loss_scale), *optimizer_parts(optimizer)])
        _ = self.evaluator.frozen_pipelines
        self.update = self._delayed(_update(self.runtime, _of_each(optimizer, adapters), outer))
        if precision.loss_scale is not None:
            assert isinstance(self.update, Descent)  # others cannot be combined with it
            self.update = LossScaled(self.update, precision.loss_scale)
        self.can_skip = faults.can_skip

    # ---- the step -------------------------------------------------------------------------------------------------

    def _train(self, state: State, batch: Batch, references: Values = MappingProxyType({})) -> tuple[State, Metrics]:
        key = jax.random.fold_in(jax.random.key(self.seed), state.step)
        drawn = self.evaluator.drawn(batch, jax.random.fold_in(key, zlib.crc32(b"batch")))
        gradients, drawn = self.beside(state, drawn, references)
        new, metrics, statistics = self.update.step(gradients, state, drawn)
        variables = flattened(state.variables)
        for path, statistic in statistics.items():
            spec = self.runtime.variables[path]
            updated = spec.update(variables[path], statistic)
            variables[path] = updated if spec.unpadded is None else with_zero_padding(updated, spec.unpadded[0])
        metrics = metrics | self.runtime.step_metrics(statistics)
        return self.update.commit(state, replace(new, variables=nested(variables))), metrics

    def _train_or_skip(
        self, state: State, batch: Batch, limits: Limits, references: Values = MappingProxyType({})
    ) -> tuple[State, Metrics]:
        return unless_faulty(state, *self._train(state, batch, references), limits)

    def beside(self, state: State, drawn: Batch, references: Values) -> tuple[GradientMethod, Batch]:
        """The way to make gradients, with the frozen models; and a batch that was drawn, on stages with what these say
        of it."""
        values = references, state.parameters, state.variables
        gradients = replace(self.gradients, references=self.evaluator.frozen(*values))
        return gradients, self.evaluator.with_references(drawn, *values)

    def _more(self, limits: Limits, references: Values) -> list[Any]:
        """The compiled step's arguments after state and batch."""
        return [*([limits] if self.can_skip else []), *([references] if references else [])]

    def _delayed(self, update: Update) -> Update:
        """Where the pipeline has no flush, an update by the gradients of the batch before."""
        gradients = self.gradients
        if not isinstance(gradients, PipelinedGradients) or gradients.pipeline.table.flush:
            return update
        assert isinstance(update, Descent)  # others cannot be combined with a pipeline
        return Delayed(update, gradients, self.evaluator)

    # ---- to be called ---------------------------------------------------------------------------------------------

    def init(self, parameters: Any = None) -> State:
        """The state at step 0, sharded: with initial values, the same bits on every layout, or with `parameters`.

        Raises `UserError` unless `parameters`, nested by path, are those of the model by path, shape and dtype; its
        layers are those that it has without `Layout.pad_layers`.
        """
        if parameters is None:
            return self._begin(*self.runtime.initialise(self.seed))
        check_parameters(parameters, self.parameters)
        return self.begin(parameters)

    def begin(self, parameters: Any) -> State:
        """`init` for parameters that are known to be the model's, as they are stored or without padding."""
        return self._begin(parameters, self.runtime.initialise_variables(self.seed))

    def _begin(self, values: Any, variables: Any) -> State:
        def begin(values: Any, variables: Any) -> State:
            values = jax.tree.map(padded, values, nested(self.parameters))
            state = State(jnp.zeros((), jnp.int32), values, self.update.init(values), variables)
            return self._cleared(state)

        shardings = jax.tree.map(lambda a: a.sharding, self.abstract_state())
        with self.runtime.tracing():
            state = self.runtime.jit(begin, out_shardings=shardings)(values, variables)
            return self.update.begin(state)

    def with_nothing_in_flight(self, state: State) -> State:
        """The state of a run that was saved with another schedule, or on other stages: the batch in flight is lost."""
        if not self.in_flight:
            return replace(state, in_flight={})
        with self.runtime.tracing():
            sharding = jax.tree.map(lambda a: a.sharding, self.abstract_state().in_flight)
            empty = self.runtime.jit(lambda state: self._cleared(state).in_flight, out_shardings=sharding)
            return replace(state, in_flight=empty(replace(state, in_flight={})))

    def _cleared(self, state: State) -> State:
        return replace(state, in_flight=self.update.empty(state.parameters, state.variables))

    def step(self, state: State, batch: Batch, limits: Limits = NO_LIMITS) -> tuple[State, Metrics]:
        """The next state, and the metrics of this step, as device scalars over the global batch.

        `loss` in nats per unit of the objective, `grad_norm` before clipping, `learning_rate`, `tokens`, what else the
        objective and the modules report, and `norms`: the squared norm of each parameter's gradient, in the order of
        `parameters`. The old state's memory is reused. Of a pipeline without a flush the metrics are of the batch
        before: see `Delayed`.
        """
        with self.runtime.tracing():
            state, metrics = self._step(state, batch, *self._more(limits, self.references.given))
        return self._finished(state), metrics

    def executed(self, compiled: Any) -> Callable[..., tuple[State, Metrics]]:
        """`step` by the compiled program that `lower().compile()` gives."""

        def step(state: State, batch: Batch, *limits: Limits) -> tuple[State, Metrics]:
            frozen = [self.references.given] if self.references.runtimes else []
            state, metrics = compiled(state, batch, *limits, *frozen)
            return self._finished(state), metrics

        return step

    def _finished(self, state: State) -> State:
        """The state after the part of a step that no program does: updating from files, where the layout has any."""
        with self.runtime.tracing():
            return self.update.finish(state)

    def evaluate(self, state: State, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Name of each of the objective's metrics → (sum, count) over a batch, by the parameters to evaluate."""
        return self.evaluator(self.evaluated(state), batch, state.variables)

    def evaluated(self, state: State) -> Any:
        """The parameters that evaluation, generation and export use: an average, where the optimizer keeps one."""
        with self.runtime.tracing():
            return self.update.evaluated(state)

    def place(self, batch: Mapping[str, Any]) -> dict[str, Array]:
        """The sequences of this process of the global batch (`host_sequences`), as sharded global arrays."""
        return self.evaluator.place(batch)

    # ---- without running it ---------------------------------------------------------------------------------------

    @cached_property
    def _step(self) -> Any:
        return self.runtime.jit(self._train_or_skip if self.can_skip else self._train, donate_argnums=0)

    def trace(self) -> Any:
        """The step, traced for abstract arguments; FLOPs are counted from its `.jaxpr`."""
        state, batch = self.abstract_state(), self.evaluator.abstract_batch
        with self.runtime.tracing():
            return self._step.trace(state, batch, *self._more(NO_LIMITS, self.references.abstract))

    def lower(self) -> Any:
        """The step, traced and lowered for abstract arguments: `.compile()` it for the mesh's devices."""
        return self.runtime.lower(self.trace())

    @cached_property
    def specs(self) -> State:
        """The state in axes: an `ArraySpec` at each leaf."""
        step = ArraySpec((), (), jnp.int32)
        optimizer, variables = self.update.specs(self.parameters), nested(self.runtime.variables)
        return State(step, nested(self.parameters), optimizer, variables, self.update.in_flight)

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of `init()`: what a checkpoint is restored into."""
        state = self.runtime.abstract(self.specs)
        return replace(state, optimizer=self.update.stored(state.optimizer))

    @property
    def in_flight(self) -> str:
        """What must be the same in a run that goes on with what this one has in flight; empty if that is nothing."""
        return self.update.identity

    @property
    def module(self) -> Any:
        return self.runtime.module

    @property
    def parameters(self) -> Any:
        """Path → specification of every parameter."""
        return self.runtime.parameters

    @property
    def placement(self) -> Placement:
        return self.runtime.placement

    @cached_property
    def flops_per_token(self) -> int:
        """Model FLOPs of training on one token, see `axon.observe.mfu`."""
        frozen = frozen_paths(self.optimizer, self.parameters)
        return self.module.flops_per_token(self.seq, *([frozen] if frozen else []))

    @property
    def choices(self) -> dict[str, str]:
        """Choices made while tracing, by topic; complete once the step has been traced."""
        return self.runtime.choices

    @property
    def host_sequences(self) -> np.ndarray:
        """Numbers of the sequences of the global batch that this process reads: all of them in a run of one process."""
        return self.evaluator.host_sequences


def _gradients(evaluator: Evaluator, seed: int) -> Gradients | PipelinedGradients:
    """The way to make gradients: a pipeline's where the mesh has stages."""
    runtime = evaluator.runtime
    if evaluator.pipeline is not None:
        return PipelinedGradients(evaluator.pipeline, seed)
    if runtime.layout.schedule is not None:
        name = type(runtime.layout.schedule).__name__
        raise UserError(
            f"Layout.schedule = {name} has no effect: Layout.mesh has no mesh axis {PIPE!r} of 2 or more, whose "
            f"devices are the stages. Add one, as in Layout.mesh = {{{PIPE!r}: 2, 'data': -1}}, or set "
            "Layout.schedule to None"
        )
    return Gradients(runtime, evaluator.objective, seed)


def _of_each(optimizer: Any, adapters: tuple[str, ...]) -> Any:
    """The optimizer, or one for each adapter that is trained at once."""
    return EachAdapter(optimizer, adapters) if adapters else optimizer


def _update(runtime: Runtime, optimizer: Optimizer | OneBitAdam, outer: DiLoCo | SlowMo | None) -> Update:
    """The update that trains with `optimizer`, and perhaps an outer method around it."""
    if isinstance(optimizer, OneBitAdam):
        return OneBit(runtime, optimizer)
    if runtime.execution.disk:
        return DiskDescent(runtime, optimizer)
    return Descent(runtime, optimizer) if outer is None else Outer(runtime, optimizer, outer)
