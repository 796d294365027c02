"""An update around another one: gradients of a scaled loss, and no update where they are not finite."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from axon.axes import ArraySpec
from axon.precision import LossScale
from axon.train.gradients import Counts, GradientMethod
from axon.train.objective import Batch, Sums
from axon.train.optimizers import Parameters
from axon.train.state import State
from axon.train.update import Descent, Metrics, Update

SCALE, STEPS = "loss_scale", "loss_scale_steps"
"""Of the optimizer's state: the scale, and how many steps in a row were finite since it changed."""


@dataclass(frozen=True)
class LossScaled(Update):
    """`inner` on the gradients of a loss times a scale, over that scale; see `axon.precision.LossScale`.

    The metrics have `loss_scale`, that of this step, and `overflow`: 1 where nothing was updated, and then the norms
    are 0, as they say nothing; at the scale's floor they are as they came.
    """

    inner: Descent
    loss_scale: LossScale

    def specs(self, parameters: Parameters) -> Any:
        own = {SCALE: ArraySpec((), (), jnp.float32), STEPS: ArraySpec((), (), jnp.int32)}
        return self.inner.specs(parameters) | own

    def init(self, values: Any) -> Any:
        own = {SCALE: jnp.float32(self.loss_scale.initial), STEPS: jnp.zeros((), jnp.int32)}
        return self.inner.init(values) | own

    def evaluated(self, state: State) -> Any:
        return self.inner.evaluated(state)

    def step(self, gradients: GradientMethod, state: State, batch: Batch) -> tuple[State, Metrics, Mapping[str, Array]]:
        scale, steps = state.optimizer[SCALE], state.optimizer[STEPS]
        before = replace(state, optimizer={k: v for k, v in state.optimizer.items() if k not in (SCALE, STEPS)})
        after, metrics, statistics = self.inner.step(_Scaled(gradients, scale), before, batch)
        finite = jnp.isfinite(metrics["grad_norm"])
        kept = replace(before, step=after.step)
        after = jax.tree.map(lambda new, old: new if new is old else jnp.where(finite, new, old), after, kept)
        scales = dict(zip((SCALE, STEPS), self.loss_scale.updated(scale, steps, finite), strict=True))
        hidden = ~finite & (scale > self.loss_scale.floor)
        norms = {name: jnp.where(hidden, 0, metrics[name]) for name in ("grad_norm", "norms")}
        more = norms | {"loss_scale": scale, "overflow": (~finite).astype(jnp.int32)}
        return replace(after, optimizer=after.optimizer | scales), metrics | more, statistics


@dataclass(frozen=True)
class _Scaled(GradientMethod):
    """Gradients of a loss times `scale`, divided by it."""

    method: GradientMethod
    scale: Array

    def counts(self, batch: Batch) -> Counts:
        return self.method.counts(batch)

    def __call__(self, state: State, batch: Batch, counts: Counts, frozen: Collection[str] = ()) -> tuple[Any, Sums]:
        divisors = {name: count / self.scale for name, count in counts.items()}
        gradients, sums = self.method(state, batch, divisors, frozen)
        return jax.tree.map(lambda g: g / self.scale, gradients), sums
