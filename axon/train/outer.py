"""Training replicas apart: an outer method as a loop around the step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding

from axon.layout import Layout
from axon.parallel.outer import DiLoCo, SlowMo
from axon.parallel.replicas import REPLICA, check_replicas, mean_over_replicas, per_replica, stacked, stacked_spec
from axon.train.optimizer import AdamW
from axon.train.step import Program, State


class OuterProgram(Program):
    """A `Program` whose replicas take the step apart; every `outer.every` steps an outer step joins them.

    The state: `parameters` are the outer ones, as of the last outer step: evaluation, generation and export use them.
    `outer` holds what comes on top: each replica's `parameters` (`replicas …`) and the outer `momentum`, which lies
    under the `optimizer` rows. `optimizer` is each replica's own, with `replicas` in front.

    The metrics: `tokens` are those of the global batch and `loss` is its mean: nats summed over replicas by tokens
    summed over replicas, each replica's nats by its own parameters. A replica's gradient is that of the mean over its
    own tokens, and is clipped by its own norm; `norms` are squared norms averaged over replicas, and `grad_norm`
    is the root of their sum. Only these scalars cross `replica` in an inner step; the outer step averages the
    parameters over it.

    Raises `LayoutError` if the mesh has no `replica` axis of 2 or more.
    """

    def __init__(self, model: Any, layout: Layout, optimizer: AdamW, *, outer: DiLoCo | SlowMo, **options: Any):
        super().__init__(model, layout, optimizer, **options)
        self.replicas = check_replicas(self.placement, type(outer).__name__)
        self.outer = outer

    def abstract_state(self) -> State:
        one = super().abstract_state()
        momentum = self._tree(lambda spec: self._abstract(spec, "optimizer"))
        own = jax.tree.map(self._stacked_abstract, (one.parameters, one.optimizer))
        return State(one.step, one.parameters, own[1], {"parameters": own[0], "momentum": momentum})

    def _begin(self, values: Any) -> State:
        one = super()._begin(values)
        own = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (self.replicas, *x.shape)), (values, one.optimizer))
        return State(one.step, values, own[1], {"parameters": own[0], "momentum": jax.tree.map(jnp.zeros_like, values)})

    def _stacked_abstract(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding)
        sharding = NamedSharding(leaf.sharding.mesh, stacked_spec(leaf.sharding.spec))
        return jax.ShapeDtypeStruct((self.replicas, *leaf.shape), leaf.dtype, sharding=sharding)

    # ---- the step -------------------------------------------------------------------------------------------------

    def _train(self, state: State, batch: Mapping[str, Array]) -> tuple[State, dict[str, Array]]:
        def inner(step, own, batch):
            parameters, optimizer = own
            new, metrics = self._update(State(step, parameters, optimizer), batch)
            return (new.parameters, new.optimizer), _of_global_batch(metrics)

        own = (state.outer["parameters"], state.optimizer)
        (local, optimizer), metrics = per_replica(inner)(state.step, own, self._with_rows(batch))
        step = state.step + 1
        parameters, momentum, local = lax.cond(
            step % self.outer.every == 0,
            lambda held: self._outer_step(step, *held),
            lambda held: held,
            (state.parameters, state.outer["momentum"], local),
        )
        return State(step, parameters, optimizer, {"parameters": local, "momentum": momentum}), metrics

    def _outer_step(self, step: Array, parameters: Any, momentum: Any, local: Any) -> tuple[Any, Any, Any]:
        """The outer parameters moved, their momentum, and every replica's parameters set to them."""
        params = self._tree(lambda spec: self.placement.spec(spec.axes, "params"))
        mean = self._moved(jax.tree.map(mean_over_replicas, local, params), "optimizer")
        rate = self._mean_rate(step)
        moved = jax.tree.map(
            lambda x, mean, m: self.outer.update(x, mean, m, rate), self._moved(parameters, "optimizer"), mean, momentum
        )
        values, momentum = jax.tree.transpose(jax.tree.structure(parameters), jax.tree.structure((0, 0)), moved)
        values = self._moved(values, "params")
        return values, momentum, jax.tree.map(lambda x, spec: stacked(x, self.replicas, spec), values, params)

    def _mean_rate(self, step: Array) -> Array:
        """The mean learning rate of the round that ends before `step`, above 0."""
        steps = step - self.outer.every + jnp.arange(self.outer.every)
        rates = jax.vmap(lambda s: jnp.asarray(self._schedule(s), jnp.float32))(steps)
        return jnp.maximum(jnp.mean(rates), jnp.finfo(jnp.float32).tiny)


def _of_global_batch(metrics: Mapping[str, Array]) -> dict[str, Array]:
    """A replica's metrics as those of all: see `OuterProgram`."""
    own, norms = metrics["tokens"], lax.pmean(metrics["norms"], REPLICA)
    tokens = lax.psum(own, REPLICA)
    loss = lax.psum(metrics["loss"] * own, REPLICA) / tokens
    return {**metrics, "loss": loss, "tokens": tokens, "norms": norms, "grad_norm": jnp.sqrt(jnp.sum(norms))}
