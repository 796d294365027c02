"""Adam with decoupled weight decay."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import optax

from axon.checks import check_range
from axon.train.optimizers.base import Rule
from axon.train.optimizers.groups import Parameters


@dataclass(frozen=True)
class AdamW(Rule):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101).

    Args, besides those of `Rule`:
        b1, b2, eps: Adam's; the default eps, the paper's, makes whole steps of gradients
            that are nothing but rounding, so that layouts differ by more than rounding from the second step on (see
            docs/measurements.md, "Eps").
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    _: KW_ONLY
    weight_decay: float = 0.1

    by_layer: ClassVar[bool] = True
    signed: ClassVar[Mapping[str, bool]] = {"mu": True, "nu": False}

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[0, 1)", "b1", "b2")
        check_range(self, "(0, inf)", "eps")

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """The first moment over the root of the second."""
        return optax.scale_by_adam(self.b1, self.b2, self.eps)
