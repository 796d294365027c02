"""A language model that scores texts."""

from dataclasses import dataclass
from typing import Any

from axon.nn import Param
from axon.nn.param import normal
from axon.tune.with_head import WithHead


@dataclass(frozen=True)
class RewardModel(WithHead):
    """`model`, and `score`, `embed`, which makes a number of the last hidden state; for the objective `Reward`.

    A run that starts from a language model takes all but that: `InitFrom.paths = ('*', '!score')`.
    """

    def build(self) -> Any:
        module = self.model.build()
        module.score = Param("embed", module.dims, normal(module.dims["embed"] ** -0.5))
        module.on_top, module.predicts_tokens = ("score",), False
        return module
