"""Lion: the sign of a momentum."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import optax

from axon.checks import check_range
from axon.train.optimizers.base import Rule
from axon.train.optimizers.groups import Group, Parameters
from axon.train.optimizers.schedule import AnySchedule


@dataclass(frozen=True)
class Lion(Rule):
    """Steps along sign(b1·momentum + (1 − b1)·gradient) (Chen et al., arXiv:2302.06675): half of Adam's state.

    Every element moves by the whole rate: take a third to a tenth of AdamW's, and as many times its weight decay.

    Args:
        schedule: the learning rate. b1: weight of the momentum in a step's direction; b2: decay of the momentum.
            weight_decay: on matrices only. clip: largest global norm of the gradients; None leaves them.
            groups: parameters with a rate or decay of their own. momentum_dtype: of the momentum.
    """

    schedule: AnySchedule
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 1.0
    clip: float | None = 1.0
    groups: tuple[Group, ...] = ()
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"

    by_layer: ClassVar[bool] = True

    def __post_init__(self):
        check_range(self, "[0, 1)", "b1", "b2")
        check_range(self, "[0, inf)", "weight_decay")
        check_range(self, "(0, inf)", "clip")

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """The sign of the gradient and the momentum, interpolated."""
        return optax.scale_by_lion(self.b1, self.b2, mu_dtype=self.momentum_dtype)
