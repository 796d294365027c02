"""A language model that scores texts."""

from dataclasses import dataclass
from typing import Any

from axon.model_config import vocab_of
from axon.nn import Param
from axon.nn.param import normal


@dataclass(frozen=True)
class RewardModel:
    """`model`, and `score`, `embed`, which makes a number of the last hidden state; for the objective `Reward`.

    A run that starts from a language model takes all but that: `InitFrom.paths = ('*', '!score')`.
    """

    model: Any

    @property
    def vocab(self) -> int:
        """See `axon.model_config.TextConfig`."""
        vocab = vocab_of(self.model)
        assert vocab is not None
        return vocab

    def build(self) -> Any:
        module = self.model.build()
        module.score = Param("embed", module.dims, normal(module.dims["embed"] ** -0.5))
        return module
