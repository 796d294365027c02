"""From a direction to updates: learning rate, weight decay and frozen parameters."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from axon.nn import ParamSpec
from axon.train.optimizers.groups import Group, Parameters, group_of_each
from axon.train.optimizers.moments import Moments, rounded
from axon.train.optimizers.schedule import Schedule


def descend(
    direction: optax.GradientTransformation,
    parameters: Parameters,
    schedule: Schedule,
    weight_decay: float,
    groups: Sequence[Group],
    moments: Moments = Moments(),
) -> optax.GradientTransformation:
    """Steps of −rate·(direction + decay·value), rate and decay by group; frozen parameters have neither state nor
    update.

    `direction` transforms the gradients of all trained parameters, before rate and decay. Its state is kept as
    `moments` says. For parameters narrower than float32 the arithmetic is float32, and a step is one to a value that
    they have, which is rounded stochastically: to nearest, steps of less than half of its last place would be lost.
    """
    group = group_of_each(parameters, groups)
    rate = schedule.function()

    def init(params: Any) -> Any:
        count = jnp.zeros((), jnp.int32)
        return {"count": count, "direction": moments.stored(direction.init(widened(params)), parameters, count)}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        values, now, count = widened(params), jnp.asarray(rate(state["count"])), state["count"] + 1
        directions: Any
        before = moments.loaded(state["direction"], parameters)
        directions, inner = direction.update(widened(updates), before, values)

        def step(path: str) -> Array:
            decay = _decay(parameters[path], group[path], weight_decay)
            towards = directions[path] + decay * values[path] if decay else directions[path]
            whole = -now * group[path].rate * towards
            if params[path].dtype != jnp.bfloat16:
                return whole
            return rounded(values[path] + whole, parameters[path], count).astype(jnp.float32) - values[path]

        after = {"count": count, "direction": moments.stored(inner, parameters, count)}
        return {path: step(path) for path in directions}, after

    trained = [path for path in parameters if not group[path].frozen]
    return restricted(optax.GradientTransformation(init, update), trained)


def restricted(transformation: optax.GradientTransformation, paths: Collection[str]) -> optax.GradientTransformation:
    """The transformation of these parameters only: others have neither state nor update.

    It can be given some of them alone, as each layer is where they are updated one by one (`axon.train.streamed`).
    """

    def only(values: Any) -> dict[str, Array]:
        return {path: values[path] for path in paths if path in values}

    def init(params: Any) -> Any:
        return transformation.init(only(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return transformation.update(only(updates), state, only(params))

    return optax.GradientTransformation(init, update)


def joined(parts: Mapping[str, optax.GradientTransformation]) -> optax.GradientTransformation:
    """Transformations of different parameters as one, whose state has a part for each by name."""

    def init(params: Any) -> Any:
        return {name: part.init(params) for name, part in parts.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        results: dict[str, Any] = {name: part.update(updates, state[name], params) for name, part in parts.items()}
        joint = {path: step for steps, _ in results.values() for path, step in steps.items()}
        return joint, {name: after for name, (_, after) in results.items()}

    return optax.GradientTransformation(init, update)


def widened(values: Mapping[str, Array]) -> dict[str, Array]:
    """Values in float32 at least: in narrower types small steps would be rounded away."""
    return {path: value.astype(jnp.promote_types(value.dtype, jnp.float32)) for path, value in values.items()}


def _decay(spec: ParamSpec, group: Group, weight_decay: float) -> float:
    if group.weight_decay is not None:
        return group.weight_decay
    return weight_decay if spec.decay else 0.0
