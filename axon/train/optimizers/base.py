"""The protocol of an optimizer: a frozen dataclass that returns an optax transformation of parameters by path."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import optax
from jax import Array

from axon.checks import check_range
from axon.composition import ACROSS_LAYERS, AVERAGES, FREEZES, Part, parts_of
from axon.errors import UserError
from axon.train.optimizers.descend import descend
from axon.train.optimizers.groups import Group, Parameters, frozen_in
from axon.train.optimizers.moments import MomentFormat, Moments
from axon.train.optimizers.schedule import AnySchedule, Schedule


class Optimizer(Protocol):
    """How parameters are updated. `schedule` is the learning rate that a run reports; `clip` the largest global norm of
    the gradients, or None."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def clip(self) -> float | None: ...

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        """The transformation of gradients into updates, both path → array; learning rate and decay included.

        A path without an update is unchanged. Updates may be wider than the parameters: the sum is cast once.
        """
        ...


@runtime_checkable
class Freezing(Optimizer, Protocol):
    """An optimizer that freezes some parameters: their gradients are not computed."""

    def frozen(self, parameters: Parameters) -> frozenset[str]:
        """The paths of frozen parameters."""
        ...


@runtime_checkable
class Averaging(Optimizer, Protocol):
    """An optimizer whose parameters to evaluate differ from those that it trains."""

    def evaluated(self, state: Any, values: Mapping[str, Array]) -> dict[str, Array]:
        """The parameters to evaluate, from its state and the trained ones, all under the `optimizer` rows."""
        ...


@runtime_checkable
class ByLayer(Optimizer, Protocol):
    """An optimizer that says whether it updates each layer, and each other parameter, from its own gradient, value and
    state alone. Its transformation can then be given some of the parameters, one layer of those that are stacked."""

    @property
    def by_layer(self) -> bool: ...


@runtime_checkable
class Multiplying(Optimizer, Protocol):
    """An optimizer whose update multiplies matrices, which takes time besides that of its state's bytes."""

    def update_flops(self, parameters: Parameters) -> dict[str, float]:
        """Path → FLOPs of a step, of all of a parameter's matrices, as of products in bfloat16; one in float32 at the
        highest precision counts as six of these."""
        ...


def update_flops(optimizer: object, parameters: Parameters) -> dict[str, float]:
    """The FLOPs of the matrix products in an update, by the path of what they update."""
    return optimizer.update_flops(parameters) if isinstance(optimizer, Multiplying) else {}


def optimizer_parts(optimizer: Any) -> list[Part]:
    """What an optimizer is for the other parts of a run: see `axon.composition`."""
    inner = getattr(optimizer, "optimizer", optimizer)
    traits = {AVERAGES: isinstance(optimizer, Averaging), ACROSS_LAYERS: not is_by_layer(optimizer)}
    own = Part(
        f"Train.optimizer = {type(inner).__name__}",
        "use another optimizer, as AdamW",
        frozenset(trait for trait, has_it in traits.items() if has_it),
        {} if isinstance(optimizer, Freezing) else {FREEZES: "it updates all parameters"},
    )
    return [own, *parts_of(optimizer)]


@dataclass(frozen=True)
class Rule:
    """An optimizer with one rule for all parameters: steps of −rate·(direction + decay·value), by group.

    A subclass is a frozen dataclass that implements `direction`.

    Args:
        schedule: the learning rate. weight_decay: on matrices only, never on norms and biases. clip: largest global
            norm of the gradients; None leaves them. groups: parameters with a rate or decay of their own, the first
            that matches. moments: how they are kept, see `axon.train.optimizers.moments.Moments`, whose names in the
            state a subclass declares as `signed`.
    """

    schedule: AnySchedule
    _: KW_ONLY
    weight_decay: float = 0.0
    clip: float | None = 1.0
    groups: tuple[Group, ...] = ()
    moments: MomentFormat = "float32"

    signed: ClassVar[Mapping[str, bool]] = MappingProxyType({})

    def __post_init__(self):
        check_range(self, "[0, inf)", "weight_decay")
        check_range(self, "(0, inf)", "clip")
        if self.moments != "float32" and not self.signed:
            name = type(self).__name__
            raise UserError(
                f"{name}.moments = {self.moments!r}, and {name}.signed names no moments of its state: set moments = "
                "'float32', or declare them"
            )

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """The transformation from gradients, path → array, to directions, before rate and decay."""
        raise NotImplementedError

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        return descend(
            self.direction(parameters),
            parameters,
            self.schedule,
            self.weight_decay,
            self.groups,
            Moments(self.moments, self.signed),
        )

    def frozen(self, parameters: Parameters) -> frozenset[str]:
        return frozen_in(parameters, self.groups)


def is_by_layer(optimizer: object) -> bool:
    """Whether `optimizer` can update one layer at a time."""
    return isinstance(optimizer, ByLayer) and optimizer.by_layer


def frozen_paths(optimizer: object, parameters: Parameters) -> frozenset[str]:
    """The parameters that `optimizer` freezes, and those that a weight transform does."""
    return optimizer.frozen(parameters) if isinstance(optimizer, Freezing) else frozenset()
