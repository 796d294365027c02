"""Any optax transformation as an optimizer."""

from collections.abc import Callable
from dataclasses import dataclass

import optax

from axon.checks import check_range
from axon.train.optimizers.groups import Parameters
from axon.train.optimizers.schedule import AnySchedule


@dataclass(frozen=True)
class Optax:
    """An optimizer of optax, or of your own: `Optax(optax.adabelief, Cosine(…))`.

    State of a parameter's shape is sharded as the layout shards optimizer state; other state, as factored moments, is
    replicated where its axes cannot be inferred. The transformation is given path → array, with the layers of a depth
    stacked in one array: one that is not elementwise must allow for that.

    Args:
        transformation: from the learning rate at each step to the whole transformation, as `optax.adabelief` or a
            function of your own. schedule: the learning rate. clip: largest global norm of the gradients; None
            leaves them.
    """

    transformation: Callable[[optax.Schedule], optax.GradientTransformation]
    schedule: AnySchedule
    clip: float | None = 1.0

    def __post_init__(self):
        check_range(self, "(0, inf)", "clip")

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        return self.transformation(self.schedule.function())
