"""A step that may decide, by its own metrics, that its update is not applied."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from axon.train.faults import Limits
from axon.train.state import State
from axon.train.update import Metrics


def unless_faulty(before: State, after: State, metrics: Metrics, limits: Limits) -> tuple[State, Metrics]:
    """The state after a step, or where its loss or gradient norm is not finite, or above its limit, that before it.

    The step's number, and a batch in flight, are those of `after` always. The metric `skipped` is 1 or 0. All devices
    decide alike: the metrics are of the global batch, the same bits on each.
    """
    fine = [jnp.isfinite(metrics[name]) & (metrics[name] <= limits[name]) for name in ("loss", "grad_norm")]
    skipped = ~jnp.all(jnp.stack(fine))
    kept = replace(before, step=after.step, in_flight=after.in_flight)
    state = jax.tree.map(lambda new, old: new if new is old else jnp.where(skipped, old, new), after, kept)
    return state, metrics | {"skipped": skipped.astype(jnp.int32)}
