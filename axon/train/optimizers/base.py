"""What an optimizer is: a frozen dataclass that makes an optax transformation of parameters by path."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import optax
from jax import Array

from axon.train.optimizers.descend import descend
from axon.train.optimizers.groups import Group, Parameters, frozen_in
from axon.train.optimizers.schedule import AnySchedule, Schedule


class Optimizer(Protocol):
    """How parameters move. `schedule` is the learning rate that a run reports; `clip` the largest global norm of the
    gradients, None to leave them."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def clip(self) -> float | None: ...

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        """The transformation of gradients into updates, both path → array; learning rate and decay included.

        A path without an update stays as it is. Updates may be wider than the parameters: their sum is cast once.
        """
        ...


@runtime_checkable
class Freezing(Optimizer, Protocol):
    """An optimizer that leaves some parameters as they are: no gradient of theirs is computed."""

    def frozen(self, parameters: Parameters) -> frozenset[str]:
        """Their paths."""
        ...


@runtime_checkable
class Averaging(Optimizer, Protocol):
    """An optimizer whose parameters to evaluate are others than those that it trains."""

    def evaluated(self, state: Any, values: Mapping[str, Array]) -> dict[str, Array]:
        """The parameters to evaluate, of its state and the trained ones, all under the `optimizer` rows."""
        ...


class Rule:
    """An optimizer that is one rule for all parameters: steps of −rate·(direction + decay·value), by group.

    A dataclass of this kind has the fields below, and says its `direction`.
    """

    schedule: AnySchedule
    weight_decay: float
    clip: float | None
    groups: tuple[Group, ...]

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """What turns gradients, path → array, into what is followed, before rate and decay."""
        raise NotImplementedError

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        return descend(self.direction(parameters), parameters, self.schedule, self.weight_decay, self.groups)

    def frozen(self, parameters: Parameters) -> frozenset[str]:
        return frozen_in(parameters, self.groups)


def frozen_paths(optimizer: object, parameters: Parameters) -> frozenset[str]:
    """The parameters that `optimizer` leaves as they are."""
    return optimizer.frozen(parameters) if isinstance(optimizer, Freezing) else frozenset()
