"""Adam with decoupled weight decay."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import optax

from axon.checks import check_range
from axon.train.optimizers.base import Rule
from axon.train.optimizers.groups import Group, Parameters
from axon.train.optimizers.schedule import AnySchedule


@dataclass(frozen=True)
class AdamW(Rule):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101).

    Args:
        schedule: the learning rate. b1, b2, eps: Adam's; the default eps, the paper's, makes whole steps of gradients
            that are nothing but rounding, so that layouts differ by more than rounding from the second step on (see
            docs/measurements.md, "Eps"). weight_decay: on matrices only, never on norms and biases.
        clip: largest global norm of the gradients; None leaves them. groups: parameters with a rate or decay of their
            own, the first that matches. momentum_dtype: of the first moment.
    """

    schedule: AnySchedule
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    groups: tuple[Group, ...] = ()
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"

    by_layer: ClassVar[bool] = True

    def __post_init__(self):
        check_range(self, "[0, 1)", "b1", "b2")
        check_range(self, "[0, inf)", "weight_decay")
        check_range(self, "(0, inf)", "eps", "clip")

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """The first moment over the root of the second."""
        return optax.scale_by_adam(self.b1, self.b2, self.eps, mu_dtype=self.momentum_dtype)
