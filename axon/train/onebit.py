"""1-bit Adam: gradients are not reduced over replicas, and momentum is sent over the slow link as signs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import ArraySpec
from axon.layout import LayoutError
from axon.layout.placement import DEVICES
from axon.parallel.onebit import chunk_size, compressed_means
from axon.parallel.replicas import REPLICA, check_replicas, mean_over_replicas, per_replica, stacked_spec
from axon.runtime import Runtime, flattened, nested
from axon.train.gradients import GradientMethod
from axon.train.objective import Batch, Sums
from axon.train.optimizers import OneBitAdam, Parameters
from axon.train.outer import over_replicas, replicated_spec
from axon.train.state import State
from axon.train.update import Metrics, Update, clipped, metrics


@dataclass(frozen=True)
class OneBit(Update):
    """1-bit Adam's update around the gradients of each replica.

    The state: `mu` and `nu`, Adam's, the same on every replica; `worker_error`, the compression error of each replica's
    messages, `replicas …`; and `server_error`, that of each device's averages: `devices chunk`.

    The metrics are a plain step's, except that after the warm-up `norms` are squared norms of the replicas'
    gradients, averaged over replicas, and `grad_norm` the root of their sum: the mean gradient is never computed.

    Raises `LayoutError` for a mesh without a `replica` axis of 2 or more, and for ZeRO-2 and 3.
    """

    runtime: Runtime
    optimizer: OneBitAdam

    def __post_init__(self):
        check_replicas(self.runtime.placement, type(self.optimizer).__name__)
        self._check_zero()

    def _check_zero(self) -> None:
        placement = self.runtime.placement
        data = set(placement.mesh_axes("batch"))
        for path, spec in self.runtime.parameters.items():
            if split := data & {a for name in spec.axes for a in placement.mesh_axes(name, "grads")}:
                over = ", ".join(map(repr, sorted(split)))
                raise LayoutError(
                    f"OneBitAdam compresses momentum of whole gradients, and Layout.zero = {placement.layout.zero} (or "
                    f"a row of grads) splits that of {path} over {over}. Set Layout.zero to 0 or 1, or use AdamW"
                )

    @cached_property
    def replicas(self) -> int:
        return self.runtime.placement.mesh.shape[REPLICA]

    @property
    def mesh(self) -> Mapping[str, int]:
        return {axis: size for axis, size in self.runtime.placement.mesh.shape.items() if size > 1}

    def specs(self, parameters: Parameters) -> Any:
        moments = nested({p: ArraySpec(s.axes, s.shape, jnp.float32, "optimizer") for p, s in parameters.items()})
        return {
            "mu": moments,
            "nu": moments,
            "worker_error": jax.tree.map(lambda spec: replicated_spec(spec, self.replicas), moments),
            "server_error": jax.tree.map(self._server_error_spec, moments),
        }

    def _server_error_spec(self, spec: ArraySpec) -> ArraySpec:
        """One chunk for each device. Its shape depends on the mesh, so it can be restored on the same mesh only."""
        placement = self.runtime.placement
        shard = placement.sharding(spec.axes, "optimizer").shard_shape(spec.shape)
        chunk = chunk_size(math.prod(shard), self.replicas)
        return ArraySpec((DEVICES, "_chunk"), (placement.mesh.size, chunk), jnp.float32, "optimizer")

    def init(self, values: Any) -> Any:
        specs = self.specs(self.runtime.parameters)
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)

    def evaluated(self, state: State) -> Any:
        return state.parameters

    def step(self, gradients: GradientMethod, state: State, batch: Batch) -> tuple[State, Metrics, Mapping[str, Array]]:
        counts = gradients.counts(batch)
        by_replica, sums = self._by_replica(gradients, state, batch, counts)
        moments, norms = lax.cond(
            state.step < self.optimizer.warmup,
            lambda operands: self._warm(*operands),
            lambda operands: self._frozen(*operands),
            (state.optimizer, by_replica),
        )
        values = self.runtime.reshard(self._moved(state, moments), "params")
        after = State(state.step + 1, values, moments, state.variables)
        return after, metrics(self._rate(state), sums, counts, norms), sums.statistics

    def _by_replica(self, gradients: GradientMethod, state: State, batch: Batch, counts: Any) -> tuple[Any, Sums]:
        """Gradients `replicas …` whose mean is that of the global batch, and its sums."""

        def local(shared: Any, _: Any, batch: Batch) -> tuple[Any, Sums]:
            step, parameters, variables, share = shared
            own, sums = gradients(State(step, parameters, None, variables), batch, share)
            return own, over_replicas(self.runtime.variables, sums)

        share = {name: count / self.replicas for name, count in counts.items()}
        return per_replica(local)((state.step, state.parameters, state.variables, share), {}, batch)

    def _warm(self, moments: dict[str, Any], gradients: Any) -> tuple[dict[str, Any], Array]:
        """Adam's moments of the mean gradient, and its squared norms by parameter."""
        mean, norms = clipped(jax.tree.map(mean_over_replicas, gradients, self._specs("grads")), self.optimizer.clip)
        mean = self.runtime.reshard(mean, "optimizer")
        b1, b2 = self.optimizer.b1, self.optimizer.b2
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, moments["mu"], mean)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), moments["nu"], mean)
        return {**moments, "mu": mu, "nu": nu}, norms

    def _frozen(self, moments: dict[str, Any], gradients: Any) -> tuple[dict[str, Any], Array]:
        """The moments with the momentum of all replicas' gradients, exchanged as signs, and the variance frozen; and
        the mean of the squared norms."""
        gradients, norms = self._clipped_by_replica(gradients)
        specs = self._specs("optimizer")
        own = jax.tree.map(stacked_spec, specs)
        devices = jax.tree.map(lambda _: self._by_device, specs)
        gradients = jax.tree.map(axes.reshard, gradients, own)
        exchange = axes.per_device(self._exchange, (specs, own, own, devices), (specs, own, devices))
        mu, worker, server = exchange(moments["mu"], gradients, moments["worker_error"], moments["server_error"])
        return {**moments, "mu": mu, "worker_error": worker, "server_error": server}, norms

    def _specs(self, kind: str) -> Any:
        placement = self.runtime.placement
        return nested({path: placement.spec(spec.axes, kind) for path, spec in self.runtime.parameters.items()})

    @property
    def _by_device(self) -> PartitionSpec:
        return PartitionSpec(tuple(self.runtime.placement.mesh.axis_names), None)

    def _exchange(self, mu: Any, gradients: Any, worker: Any, server: Any) -> tuple[Any, Any, Any]:
        """Of one device's shards: the new momentum, and the two compression errors."""
        b1 = self.optimizer.b1
        momentum = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g[0], mu, gradients)
        flat, tree = jax.tree.flatten(momentum)
        errors = ([x[0] for x in jax.tree.leaves(error)] for error in (worker, server))
        means, worker, server = compressed_means(flat, *errors, mesh_axis=REPLICA, workers=self.replicas)
        results = (means, [x[None] for x in worker], [x[None] for x in server])
        mu, worker, server = (jax.tree.unflatten(tree, leaves) for leaves in results)
        return mu, worker, server

    def _clipped_by_replica(self, gradients: Any) -> tuple[Any, Array]:
        """Each replica's gradients clipped by their own norm; squared norms by parameter, averaged over replicas."""
        squares = [jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(gradients)]
        if self.optimizer.clip is not None:
            factor = jnp.minimum(1.0, self.optimizer.clip / (jnp.sqrt(sum(squares)) + 1e-6))
            gradients = jax.tree.map(lambda g: g * lax.expand_dims(factor, range(1, g.ndim)), gradients)
        return gradients, jnp.stack([jnp.mean(s) for s in squares])

    def _rate(self, state: State) -> Array:
        return jnp.asarray(self.optimizer.schedule.function()(state.step), jnp.float32)

    def _moved(self, state: State, moments: Mapping[str, Any]) -> Any:
        """The parameters after AdamW's update with these moments; the variance's bias is corrected for the warm-up's
        steps only, after which it is frozen."""
        count, adam = state.step + 1, self.optimizer
        rate = self._rate(state)
        mean = 1 - adam.b1**count
        variance = 1 - adam.b2 ** jnp.minimum(count, adam.warmup)
        values = flattened(self.runtime.reshard(state.parameters, "optimizer"))
        mu, nu = flattened(moments["mu"]), flattened(moments["nu"])

        def step(path: str) -> Array:
            decay = adam.weight_decay * values[path] if self.runtime.parameters[path].decay else 0
            return values[path] - rate * (mu[path] / mean / (jnp.sqrt(nu[path] / variance) + adam.eps) + decay)

        return nested({path: step(path) for path in values})
