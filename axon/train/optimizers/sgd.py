"""Stochastic gradient descent with momentum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import optax

from axon.checks import check_range
from axon.errors import UserError
from axon.train.optimizers.base import Rule
from axon.train.optimizers.groups import Parameters


@dataclass(frozen=True)
class SGD(Rule):
    """Gradient descent with momentum: m ← momentum·m + gradient (Sutskever et al., 2013), weight decay decoupled.

    Args, besides those of `Rule`:
        momentum: its decay; 0 for none, and no state. nesterov: step along gradient + momentum·m.
    """

    momentum: float = 0.9
    nesterov: bool = False

    by_layer: ClassVar[bool] = True
    signed: ClassVar[Mapping[str, bool]] = {"trace": True}

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[0, 1)", "momentum")
        if self.nesterov and not self.momentum:
            raise UserError("SGD.nesterov = True needs a momentum, and SGD.momentum is 0; set it, as 0.9")

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """The momentum, or the gradient where there is none."""
        if not self.momentum:
            return optax.identity()
        return optax.trace(self.momentum, self.nesterov)
