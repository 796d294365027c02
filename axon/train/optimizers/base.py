"""What an optimizer is: a frozen dataclass that makes an optax transformation of parameters by path."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import Array

from axon.axes import ArraySpec
from axon.checks import check_range
from axon.errors import UserError, suggest
from axon.nn import ParamSpec
from axon.train.optimizers.schedule import Schedule

Parameters = Mapping[str, ParamSpec]
"""Path → specification."""


class Optimizer(Protocol):
    """How parameters move. `schedule` is the learning rate that a run reports; `clip` the largest global norm of the
    gradients, None to leave them."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def clip(self) -> float | None: ...

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        """The transformation of gradients into updates, both path → array; learning rate and decay included."""
        ...


@runtime_checkable
class Averaging(Optimizer, Protocol):
    """An optimizer whose parameters to evaluate are others than those that it trains."""

    def evaluated(self, state: Any, values: Mapping[str, Array]) -> dict[str, Array]:
        """The parameters to evaluate, of its state and the trained ones."""
        ...


@dataclass(frozen=True)
class Group:
    """Parameters that learn in their own way. Of several groups the first whose pattern matches holds.

    Args:
        paths: a pattern of shell's kind for paths of parameters, as "embedding/*" or "*/attention/*".
        rate: times the schedule. weight_decay: instead of the optimizer's, and on whatever matches, vectors too; None
            for the optimizer's. frozen: whether they stay as they are, and need no state.
    """

    paths: str
    rate: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False

    def __post_init__(self):
        check_range(self, "[0, inf)", "rate", "weight_decay")


def descend(
    direction: optax.GradientTransformation,
    parameters: Parameters,
    schedule: Schedule,
    weight_decay: float,
    groups: Sequence[Group],
) -> optax.GradientTransformation:
    """Steps of −rate·(direction + decay·value), rate and decay by group; frozen parameters stay, and have no state.

    `direction` turns the gradients of all that is trained into what is followed, before rate and decay.
    """
    found = _groups(parameters, groups)
    trained = [path for path in parameters if not found[path].frozen]
    rate = schedule.function()

    def only_trained(values: Any) -> dict[str, Array]:
        return {path: values[path] for path in trained}

    def init(params: Any) -> Any:
        return {"count": jnp.zeros((), jnp.int32), "direction": direction.init(only_trained(params))}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        followed: Any
        followed, inner = direction.update(only_trained(updates), state["direction"], only_trained(params))
        now: Any = rate(state["count"])

        def step(path: str) -> Array:
            if found[path].frozen:
                return jnp.zeros_like(params[path])
            decay = _decay(parameters[path], found[path], weight_decay)
            towards = followed[path] + decay * params[path] if decay else followed[path]
            return -now * found[path].rate * towards

        return {path: step(path) for path in params}, {"count": state["count"] + 1, "direction": inner}

    return optax.GradientTransformation(init, update)


def state_specs(optimizer: Optimizer, parameters: Parameters) -> Any:
    """An optimizer's state in axes: a tree like that of its transformation, whose leaves are `ArraySpec`s.

    What stands under a parameter's path and has its shape, or its shape without some dimensions (a factored moment),
    has its axes; other dimensions are unnamed (`_0`, …), and so lie whole on every device.
    """
    values = {path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in parameters.items()}
    state = jax.eval_shape(optimizer.transform(parameters).init, values)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(path, leaf, parameters), state)


def _spec(path: Sequence[Any], leaf: Any, parameters: Parameters) -> ArraySpec:
    owner = next((key.key for key in path if getattr(key, "key", None) in parameters), None)
    axes = _matched(parameters[owner], leaf.shape) if owner is not None else None
    unnamed = tuple(f"_{i}" for i in range(len(leaf.shape)))
    return ArraySpec(unnamed if axes is None else axes, tuple(leaf.shape), leaf.dtype, "optimizer")


def _matched(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """The axes of `spec` that `shape` has in order, or None."""
    left = list(zip(spec.axes, spec.shape, strict=True))
    axes = []
    for size in shape:
        while left and left[0][1] != size:
            left.pop(0)
        if not left:
            return None
        axes.append(left.pop(0)[0])
    return tuple(axes)


def _groups(parameters: Parameters, groups: Sequence[Group]) -> dict[str, Group]:
    """The group of each parameter. Raises `UserError` for a pattern that matches none."""
    for group in groups:
        if not any(fnmatch.fnmatchcase(path, group.paths) for path in parameters):
            raise UserError(f"Group.paths = {group.paths!r} matches no parameter.{suggest(group.paths, parameters)}")
    rest = Group("*")
    return {path: next((g for g in groups if fnmatch.fnmatchcase(path, g.paths)), rest) for path in parameters}


def _decay(spec: ParamSpec, group: Group, weight_decay: float) -> float:
    if group.weight_decay is not None:
        return group.weight_decay
    return weight_decay if spec.decay else 0.0
