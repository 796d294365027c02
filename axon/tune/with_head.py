"""The base of configs that put a head on a language model."""

from dataclasses import dataclass
from typing import Any

from axon.model_config import vocab_of


@dataclass(frozen=True)
class WithHead:
    """`model`, a language model's config; subclasses add parameters to what it builds."""

    model: Any

    @property
    def vocab(self) -> int:
        """See `axon.model_config.TextConfig`."""
        vocab = vocab_of(self.model)
        assert vocab is not None
        return vocab
