"""Lion: the sign of a momentum."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import optax

from axon.checks import check_range
from axon.train.optimizers.base import Rule
from axon.train.optimizers.groups import Parameters


@dataclass(frozen=True)
class Lion(Rule):
    """Steps along sign(b1·momentum + (1 − b1)·gradient) (Chen et al., arXiv:2302.06675): half of Adam's state.

    Every element moves by the whole rate: take a third to a tenth of AdamW's, and as many times its weight decay.

    Args, besides those of `Rule`:
        b1: weight of the momentum in a step's direction; b2: decay of the momentum.
    """

    b1: float = 0.9
    b2: float = 0.99
    _: KW_ONLY
    weight_decay: float = 1.0

    by_layer: ClassVar[bool] = True
    signed: ClassVar[Mapping[str, bool]] = {"mu": True}

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[0, 1)", "b1", "b2")

    def direction(self, parameters: Parameters) -> optax.GradientTransformation:
        """The sign of the gradient and the momentum, interpolated."""
        return optax.scale_by_lion(self.b1, self.b2)
