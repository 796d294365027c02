"""Updating parameters from gradients, and the state of it: an optimizer, or a method around one."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array

from axon import axes
from axon.axes.memory import to_device
from axon.runtime import Runtime, flattened, nested
from axon.train.gradients import Counts, GradientMethod
from axon.train.objective import Batch, Sums, means
from axon.train.optimizers import Averaging, Optimizer, Parameters, frozen_paths, state_specs
from axon.train.state import State
from axon.train.streamed import Streamed, check_streams

Metrics = dict[str, Array]


class Update(Protocol):
    """A step's second half; implemented by `Descent`, `axon.train.on_disk.DiskDescent`, `axon.train.outer.Outer`,
    `axon.train.onebit.OneBit`, `axon.train.delayed.Delayed`.

    What has a default here concerns few of them: a batch in flight, and state in files.
    """

    @property
    def mesh(self) -> Mapping[str, int]:
        """The mesh axes, with their sizes, that the shape of its state depends on."""
        return {}

    def specs(self, parameters: Parameters) -> Any:
        """The state in axes: a tree, by name, whose leaves are `ArraySpec`s."""
        ...

    def init(self, values: Any) -> Any:
        """The state before the first step, for these parameters, nested by path."""
        ...

    def step(self, gradients: GradientMethod, state: State, batch: Batch) -> tuple[State, Metrics, Mapping[str, Array]]:
        """The next state, its variables unchanged; the step's metrics; and the statistics to update variables from."""
        ...

    def evaluated(self, state: State) -> Any:
        """The parameters that evaluation, generation and export use."""
        ...

    # ---- a batch in flight ----------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> Any:
        """In axes, what a step leaves for the next one to finish; nothing, where each finishes its batch."""
        return {}

    @property
    def identity(self) -> str:
        """The same for all runs that can go on with what this one has in flight; empty if that is nothing."""
        return ""

    def empty(self, parameters: Any, variables: Any) -> Any:
        """What is in flight before the first step."""
        return {}

    def commit(self, before: State, after: State) -> State:
        """The state after a step whose variables are updated: `before`, where the step finished no batch."""
        return after

    # ---- files, which no compiled program reads or writes ---------------------------------------------------------

    def stored(self, optimizer: Any) -> Any:
        """The state, of arrays or of their shapes, with what is in files in the places of its own."""
        return optimizer

    def claim_disk(self) -> None:
        """Create the folder of its files, if it has any. Raises `UserError` if that cannot be."""

    def begin(self, state: State) -> State:
        """The state of a compiled `init`, its files written."""
        return state

    def finish(self, state: State) -> State:
        """The state after a compiled `step`, with what is left to do outside of it done."""
        return state


@dataclass(frozen=True)
class Descent(Update):
    """Gradients clipped by their global norm, then the optimizer's update, under the `optimizer` rows.

    Where the layout stores optimizer state, or parameters, on the host, layers are updated one at a time.
    """

    runtime: Runtime
    optimizer: Optimizer

    def __post_init__(self):
        if self._on_host:
            check_streams(self.runtime.placement)

    def specs(self, parameters: Parameters) -> Any:
        return state_specs(self.optimizer, parameters)

    def init(self, values: Any) -> Any:
        return self.optimizer.transform(self.runtime.parameters).init(flattened(values))

    def step(self, gradients: GradientMethod, state: State, batch: Batch) -> tuple[State, Metrics, Mapping[str, Array]]:
        after, (rate, sums, counts, norms) = self.updated(gradients, state, batch)
        return after, metrics(rate, sums, counts, norms), sums.statistics

    def updated(
        self, gradients: GradientMethod, state: State, batch: Batch
    ) -> tuple[State, tuple[Array, Sums, Counts, Array]]:
        """The next state, and the arguments of `metrics`."""
        counts = gradients.counts(batch)
        found, sums = gradients(state, batch, counts, self.frozen)
        found, norms = clipped(found, self.optimizer.clip)
        return self.applied(state, found), (self.rate(state), sums, counts, norms)

    def rate(self, state: State) -> Array:
        """The learning rate of the next update.

        It is that of the optimizer's own count, by name in all of optax: there are fewer updates than steps in a run
        that left a batch in flight behind.
        """
        counts = optax.tree_utils.tree_get_all_with_path(state.optimizer, "count")
        rate = self.optimizer.schedule.function()(counts[0][1] if counts else state.step)
        return jnp.asarray(rate, jnp.float32)

    def applied(self, state: State, gradients: Any) -> State:
        """The state after one update with these gradients, nested by path, under the `grads` rows."""
        gradients = flattened(self.runtime.reshard(gradients, "optimizer"))
        update = self._streamed if self._on_host else self._whole
        parameters, optimizer = update(gradients, state.optimizer, state.parameters)
        return State(state.step + 1, parameters, optimizer, state.variables)

    def _whole(self, gradients: Mapping[str, Array], optimizer: Any, parameters: Any) -> tuple[Any, Any]:
        """Parameters and optimizer state after an update of all at once."""
        values = flattened(self.runtime.reshard(parameters, "optimizer"))
        updates: Any
        updates, optimizer = self.optimizer.transform(self.runtime.parameters).update(gradients, optimizer, values)
        moved = {path: (values[path] + step).astype(values[path].dtype) for path, step in updates.items()}
        return self.runtime.reshard(nested(values | moved), "params"), self._placed(optimizer)

    def _streamed(self, gradients: Mapping[str, Array], optimizer: Any, parameters: Any) -> tuple[Any, Any]:
        """The same, one layer at a time."""
        update = Streamed(self.optimizer, self.runtime.parameters, self.runtime.placement)
        moved, optimizer = update(gradients, optimizer, flattened(parameters))
        return nested(moved), optimizer

    @property
    def _on_host(self) -> bool:
        return bool(self.runtime.placement.host)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Paths of the parameters that are not trained."""
        return frozen_paths(self.optimizer, self.runtime.parameters)

    def _placed(self, optimizer: Any) -> Any:
        """The optimizer's state, sharded by its specs: its arithmetic may have left it sharded otherwise."""
        placement = self.runtime.placement
        specs = self.specs(self.runtime.parameters)
        return jax.tree.map(lambda s, x: axes.reshard(x, placement.spec(s.axes, s.kind)), specs, optimizer)

    def evaluated(self, state: State) -> Any:
        if not isinstance(self.optimizer, Averaging):
            return state.parameters
        return self._average(state.optimizer, state.parameters)

    @cached_property
    def _average(self) -> Any:
        averaging, runtime = self.optimizer, self.runtime
        assert isinstance(averaging, Averaging)

        def average(optimizer: Any, parameters: Any) -> Any:
            if self._on_host:
                optimizer, parameters = to_device((optimizer, parameters))
            values = flattened(runtime.reshard(parameters, "optimizer"))
            return runtime.reshard(nested(averaging.evaluated(optimizer, values)), "params")

        return runtime.jit(average)


def clipped(gradients: Any, clip: float | None) -> tuple[Any, Array]:
    """Gradients clipped to a global norm of `clip`, and their squared norms by parameter before that."""
    norms = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in flattened(gradients).values()])
    if clip is not None:
        factor = jnp.minimum(1.0, clip / (jnp.sqrt(jnp.sum(norms)) + 1e-6))
        gradients = jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients)
    return gradients, norms


def metrics(rate: Array, sums: Sums, counts: Counts, norms: Array) -> Metrics:
    """A step's metrics: means of the objective's, and its maxima. `loss` is what is minimised, unless the objective
    reports its own.

    `rate` is the learning rate; `norms` are the squared norms of the gradients by parameter, before clipping, in the
    order of the parameters.
    """
    minimised = sum(means(sums.minimised, counts).values(), jnp.zeros(()))
    return {
        "loss": minimised,
        **means(sums.metrics, counts),
        **sums.maxima,
        "grad_norm": jnp.sqrt(jnp.sum(norms)),
        "learning_rate": rate,
        "tokens": counts["tokens"],
        "norms": norms,
    }
