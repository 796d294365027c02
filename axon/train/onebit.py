"""1-bit Adam: gradients stay on their replica, and momentum crosses the slow link as signs."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from axon import axes
from axon.layout import Layout, LayoutError
from axon.parallel.onebit import chunk_size, compressed_means
from axon.parallel.replicas import REPLICA, check_replicas, mean_over_replicas, per_replica, stacked_spec
from axon.train.optimizer import OneBitAdam
from axon.train.step import Program, State


class OneBitProgram(Program):
    """A `Program` whose optimizer is `OneBitAdam`.

    The state: `optimizer` has Adam's `mu` and `nu`, the same on every replica; `sent`, what each replica's messages
    left unsaid, `replicas …`; and `averaged`, what each device's averages left unsaid: `devices chunk`.

    The metrics are a plain program's, except that after the warm-up `norms` are squared norms of the replicas'
    gradients, averaged over replicas, and `grad_norm` the root of their sum: the mean gradient is never made.

    Raises `LayoutError` for a mesh without a `replica` axis of 2 or more, and for ZeRO-2 and 3.
    """

    def __init__(self, model: Any, layout: Layout, optimizer: OneBitAdam, **options: Any):
        super().__init__(model, layout, optimizer.adamw, **options)
        self.replicas = check_replicas(self.placement, type(optimizer).__name__)
        self.onebit = optimizer
        self._check_zero()

    def _check_zero(self) -> None:
        data = set(self.placement.mesh_axes("batch"))
        for path, spec in self.parameters.items():
            if split := data & {a for name in spec.axes for a in self.placement.mesh_axes(name, "grads")}:
                over = ", ".join(map(repr, sorted(split)))
                raise LayoutError(
                    f"OneBitAdam compresses momentum of whole gradients, and Layout.zero = {self.layout.zero} (or a "
                    f"row of grads) splits that of {path} over {over}. Set Layout.zero to 0 or 1, or use AdamW"
                )

    def abstract_state(self) -> State:
        one = super().abstract_state()
        mu = self._tree(lambda spec: self._abstract(spec, "optimizer"))
        sent, averaged = jax.tree.map(self._unsaid, mu), jax.tree.map(self._unaveraged, mu)
        return State(one.step, one.parameters, {"mu": mu, "nu": mu, "sent": sent, "averaged": averaged})

    def _unsaid(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding)
        sharding = NamedSharding(leaf.sharding.mesh, stacked_spec(leaf.sharding.spec))
        return jax.ShapeDtypeStruct((self.replicas, *leaf.shape), leaf.dtype, sharding=sharding)

    def _unaveraged(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding)
        mesh, held = leaf.sharding.mesh, leaf.sharding.shard_shape(leaf.shape)
        chunk = chunk_size(math.prod(held), self.replicas)
        return jax.ShapeDtypeStruct((mesh.size, chunk), leaf.dtype, sharding=NamedSharding(mesh, self._by_device))

    @property
    def _by_device(self) -> PartitionSpec:
        """One row for each device."""
        return PartitionSpec(tuple(self.placement.mesh.axis_names), None)

    def _begin(self, values: Any) -> State:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract_state().optimizer)
        return State(jnp.zeros((), jnp.int32), values, zeros)

    # ---- the step -------------------------------------------------------------------------------------------------

    def _train(self, state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        batch = self._with_rows(batch)
        tokens = jnp.sum(batch["weights"])
        gradients, loss = self._gradients_by_replica(state, batch, tokens)
        optimizer, norms = lax.cond(
            state.step < self.onebit.warmup,
            lambda held: self._warm(*held),
            lambda held: self._frozen(*held),
            (state.optimizer, gradients),
        )
        values = self._moved(self._stepped(state, optimizer), "params")
        return State(state.step + 1, values, optimizer), self._metrics(state, loss, tokens, norms)

    def _gradients_by_replica(self, state: State, batch: Mapping[str, Array], tokens: Array) -> tuple[Any, Array]:
        """Gradients `replicas …` whose mean is that of the global batch, and its loss."""

        def local(shared, own, batch):
            step, parameters, tokens = shared
            gradients, nll = self._gradients(State(step, parameters, None), batch, tokens)
            return gradients, lax.pmean(nll, REPLICA)

        return per_replica(local)((state.step, state.parameters, tokens / self.replicas), {}, batch)

    def _warm(self, held: dict[str, Any], gradients: Any) -> tuple[dict[str, Any], Array]:
        """Adam's moments of the mean gradient, and its squared norms by parameter."""
        specs = self._tree(lambda spec: self.placement.spec(spec.axes, "grads"))
        mean, norms = self._clipped(jax.tree.map(mean_over_replicas, gradients, specs))
        mean = self._moved(mean, "optimizer")
        b1, b2 = self.onebit.b1, self.onebit.b2
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, held["mu"], mean)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), held["nu"], mean)
        return {**held, "mu": mu, "nu": nu}, norms

    def _frozen(self, held: dict[str, Any], gradients: Any) -> tuple[dict[str, Any], Array]:
        """The common momentum of all replicas' gradients, exchanged as signs, and the mean of their squared norms."""
        gradients, norms = self._clipped_by_replica(gradients)
        specs = self._tree(lambda spec: self.placement.spec(spec.axes, "optimizer"))
        own = jax.tree.map(stacked_spec, specs)
        devices = jax.tree.map(lambda _: self._by_device, specs)
        gradients = jax.tree.map(axes.reshard, gradients, own)
        exchange = axes.per_device(self._exchange, (specs, own, own, devices), (specs, own, devices))
        mu, sent, averaged = exchange(held["mu"], gradients, held["sent"], held["averaged"])
        return {**held, "mu": mu, "sent": sent, "averaged": averaged}, norms

    def _exchange(self, mu: Any, gradients: Any, sent: Any, averaged: Any) -> tuple[Any, Any, Any]:
        """Of one device's shards: the new momentum, and what was left unsaid."""
        b1 = self.onebit.b1
        momentum = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g[0], mu, gradients)
        flat, tree = jax.tree.flatten(momentum)
        unsaid, unaveraged = ([x[0] for x in jax.tree.leaves(held)] for held in (sent, averaged))
        means, left, kept = compressed_means(flat, unsaid, unaveraged, REPLICA, self.replicas)
        made = (means, [x[None] for x in left], [x[None] for x in kept])
        mu, sent, averaged = (jax.tree.unflatten(tree, leaves) for leaves in made)
        return mu, sent, averaged

    def _clipped_by_replica(self, gradients: Any) -> tuple[Any, Array]:
        """Each replica's gradients clipped by their own norm; squared norms by parameter, averaged over replicas."""
        squares = [jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(gradients)]
        if self.onebit.clip is not None:
            factor = jnp.minimum(1.0, self.onebit.clip / (jnp.sqrt(sum(squares)) + 1e-6))
            gradients = jax.tree.map(lambda g: g * lax.expand_dims(factor, range(1, g.ndim)), gradients)
        return gradients, jnp.stack([jnp.mean(s) for s in squares])

    def _stepped(self, state: State, optimizer: Mapping[str, Any]) -> Any:
        """The parameters after AdamW's update with these moments, the variance corrected for its own count only."""
        count, rate, adam = state.step + 1, self._schedule(state.step), self.onebit
        mean = 1 - adam.b1**count
        variance = 1 - adam.b2 ** jnp.minimum(count, adam.warmup)

        def step(x, m, v, decays):
            decay = adam.weight_decay * x if decays else 0
            return x - rate * (m / mean / (jnp.sqrt(v / variance) + adam.eps) + decay)

        values = self._moved(state.parameters, "optimizer")
        return jax.tree.map(step, values, optimizer["mu"], optimizer["nu"], self._decayed)
