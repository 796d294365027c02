"""Training replicas separately: an outer method around an optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.axes import ArraySpec
from axon.nn.param import VariableSpec
from axon.parallel.outer import DiLoCo, SlowMo
from axon.parallel.replicas import REPLICA, REPLICAS, check_replicas, mean_over_replicas, per_replica, stacked
from axon.runtime import Runtime, nested
from axon.train.gradients import GradientMethod
from axon.train.objective import Batch, Sums, reduced
from axon.train.optimizers import Optimizer, Parameters
from axon.train.state import State
from axon.train.update import Descent, Metrics, Update, metrics


@dataclass(frozen=True)
class Outer(Update):
    """Every replica takes the optimizer's steps by itself; every `method.every` steps an outer step averages them.

    The state: `State.parameters` are the outer ones, as of the last outer step: evaluation, generation and export use
    them. `State.optimizer` has each replica's own `parameters` and `optimizer`, with `replicas` in front, and the
    outer `momentum`, which lies under the `optimizer` rows.

    The metrics: `tokens` are those of the global batch, and each mean is over it: the objective's sum and its count for
    that sum, both added up over replicas, each replica's by its own parameters. A replica's gradient is that of the
    mean over its own counts, and is clipped by its own norm; `norms` are squared norms averaged over replicas, and
    `grad_norm` is the root of their sum. Only these scalars cross `replica` in an inner step; the outer step averages
    the parameters over it.

    Raises `LayoutError` if the mesh has no `replica` axis of 2 or more.
    """

    runtime: Runtime
    optimizer: Optimizer
    method: DiLoCo | SlowMo

    def __post_init__(self):
        check_replicas(self.runtime.placement, type(self.method).__name__)

    @cached_property
    def replicas(self) -> int:
        return self.runtime.placement.mesh.shape[REPLICA]

    @property
    def mesh(self) -> Mapping[str, int]:
        return {REPLICA: self.replicas}

    @cached_property
    def _inner(self) -> Descent:
        return Descent(self.runtime, self.optimizer)

    def specs(self, parameters: Parameters) -> Any:
        own = {"parameters": nested(parameters), "optimizer": self._inner.specs(parameters)}
        own = jax.tree.map(lambda spec: replicated_spec(spec, self.replicas), own)
        momentum = {path: ArraySpec(s.axes, s.shape, s.dtype, "optimizer") for path, s in parameters.items()}
        return own | {"momentum": nested(momentum)}

    def init(self, values: Any) -> Any:
        own = {"parameters": values, "optimizer": self._inner.init(values)}
        own = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (self.replicas, *x.shape)), own)
        return own | {"momentum": jax.tree.map(jnp.zeros_like, values)}

    def evaluated(self, state: State) -> Any:
        return state.parameters

    def step(self, gradients: GradientMethod, state: State, batch: Batch) -> tuple[State, Metrics, Mapping[str, Array]]:
        def inner(shared: Any, own: Any, batch: Batch) -> tuple[Any, Any]:
            step, variables = shared
            before = State(step, own["parameters"], own["optimizer"], variables)
            after, (rate, sums, counts, norms) = self._inner.updated(gradients, before, batch)
            sums = over_replicas(self.runtime.variables, sums)
            common = rate, sums, lax.psum(counts, REPLICA), lax.pmean(norms, REPLICA)
            return {"parameters": after.parameters, "optimizer": after.optimizer}, common

        own = {name: state.optimizer[name] for name in ("parameters", "optimizer")}
        own, (rate, sums, counts, norms) = per_replica(inner)((state.step, state.variables), own, batch)
        step = state.step + 1
        parameters, momentum, local = lax.cond(
            step % self.method.every == 0,
            lambda operands: self._outer_step(step, *operands),
            lambda operands: operands,
            (state.parameters, state.optimizer["momentum"], own["parameters"]),
        )
        optimizer = {"parameters": local, "optimizer": own["optimizer"], "momentum": momentum}
        after = State(step, parameters, optimizer, state.variables)
        return after, metrics(rate, sums, counts, norms), sums.statistics

    def _outer_step(self, step: Array, parameters: Any, momentum: Any, local: Any) -> tuple[Any, Any, Any]:
        """The updated outer parameters, their momentum, and every replica's parameters set to them."""
        runtime = self.runtime
        specs = nested({path: runtime.placement.spec(s.axes, "params") for path, s in runtime.parameters.items()})
        mean = runtime.reshard(jax.tree.map(mean_over_replicas, local, specs), "optimizer")
        rate = self._mean_rate(step)
        moved = jax.tree.map(
            lambda x, mean, m: self.method.update(x, mean, m, rate),
            runtime.reshard(parameters, "optimizer"),
            mean,
            momentum,
        )
        values, momentum = jax.tree.transpose(jax.tree.structure(parameters), jax.tree.structure((0, 0)), moved)
        values = runtime.reshard(values, "params")
        return values, momentum, jax.tree.map(lambda x, spec: stacked(x, self.replicas, spec), values, specs)

    def _mean_rate(self, step: Array) -> Array:
        """The mean learning rate of the steps since the last outer step, above 0: it is divided by."""
        steps = step - self.method.every + jnp.arange(self.method.every)
        schedule = self.optimizer.schedule.function()
        rates = jax.vmap(lambda s: jnp.asarray(schedule(s), jnp.float32))(steps)
        return jnp.maximum(jnp.mean(rates), jnp.finfo(jnp.float32).tiny)


def over_replicas(variables: Mapping[str, VariableSpec], sums: Sums) -> Sums:
    """The sums of all replicas, where `replica` is manual."""
    return reduced(variables, lambda by, x: by.over_mesh_axis(x, REPLICA), sums)


def replicated_spec(spec: ArraySpec, replicas: int) -> ArraySpec:
    """An array with one value for each replica, `replicas …`."""
    return ArraySpec((REPLICAS, *spec.axes), (replicas, *spec.shape), spec.dtype, spec.kind)
