"""Any optax transformation as an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass

import optax

from axon.checks import check_range
from axon.train.optimizers.groups import Parameters
from axon.train.optimizers.schedule import AnySchedule


@dataclass(frozen=True)
class Optax:
    """An optimizer of optax's, or of a person's own: `Optax(optax.adabelief, Cosine(…))`.

    State that has a parameter's shape lies where the layout puts the parameter's optimizer state; other state, as
    factored moments', whole on every device wherever its axes cannot be told. Parameters come as path → array, the
    layers of a depth stacked in one array: what is not element by element sees them so.

    Args:
        transformation: from the learning rate at each step to the whole transformation, as `optax.adabelief` or a
            function of a person's own. schedule: the learning rate. clip: largest global norm of the gradients; None
            leaves them.
    """

    transformation: Callable[[optax.Schedule], optax.GradientTransformation]
    schedule: AnySchedule
    clip: float | None = 1.0

    def __post_init__(self):
        check_range(self, "(0, inf)", "clip")

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        return self.transformation(self.schedule.function())
