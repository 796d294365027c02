"""Objectives: frozen dataclasses that declare a batch in axes, and compute their terms as sums and counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.errors import UserError
from axon.nn import Inputs, LanguageModel, cross_entropy

SEQUENCES = "sequences"
"""Key of a batch inside a step: the number of each of its sequences in the global batch, `batch` int32."""

Batch = Mapping[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums of an objective over a part of a batch: those of microbatches and of devices add up.

    Args:
        minimised: name → a sum; what is minimised is the sum of their means over the global batch. Each is divided by
            the count of its name, in nats or whatever the objective's own unit is.
        metrics: name → a sum that is only reported, as a mean; it carries no gradient.
        statistics: path of a module's `Variable` → the statistic that it is updated from.
    """

    minimised: dict[str, Array]
    metrics: dict[str, Array] = field(default_factory=dict)
    statistics: dict[str, Array] = field(default_factory=dict)


class Objective(Protocol):
    """What a step minimises; implemented by `NextToken`.

    Sums and counts are added up over microbatches and devices before one is divided by the other, so that the mean is
    that over the *global* batch, whatever the layout, the number of microbatches and the padding.
    """

    def specs(self, batch: int, seq: int) -> Specs:
        """The arrays of a global batch of `batch` sequences of `seq` positions; the first axis of each is `batch`."""
        ...

    def check(self, module: Any) -> None:
        """Raise `UserError` for an unsupported module."""
        ...

    def counts(self, batch: Batch) -> dict[str, Array]:
        """By name of a sum, the count that divides it, of a part of a batch; a function of the data alone.

        "tokens" is the count that a run reports, and the default for names that are missing.
        """
        ...

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        """The sums of a part of a batch. With a `key` the module is in training: dropout is drawn from it and
        `batch["sequences"]`."""
        ...


@dataclass(frozen=True)
class NextToken:
    """The next token's negative log-likelihood, in nats, over the real tokens of the batch.

    Args:
        z_loss: weight of the squared log-partition, log² Σ exp(logits) (Chowdhery et al., arXiv:2204.02311, section 5).
    """

    z_loss: float = 0.0

    def __post_init__(self):
        check_range(self, "[0, inf)", "z_loss")

    def specs(self, batch: int, seq: int) -> Specs:
        """`tokens`, `targets`, `positions` in the document, `documents` of the sequence, and `weights`, 0 for padding;
        each `batch seq`."""
        dtypes = dict.fromkeys(("tokens", "targets", "positions", "documents"), jnp.int32) | {"weights": jnp.float32}
        return {name: ArraySpec(("batch", "seq"), (batch, seq), dtype) for name, dtype in dtypes.items()}

    def check(self, module: Any) -> None:
        if not isinstance(module, LanguageModel):
            raise UserError(
                f"NextToken needs an axon.nn.LanguageModel, or a subclass of it, with a block of your own; "
                f"build() returns a {type(module).__name__}"
            )

    def counts(self, batch: Batch) -> dict[str, Array]:
        return {"tokens": jnp.sum(batch["weights"])}

    def inputs(self, batch: Batch, key: Array | None = None) -> Inputs:
        """A language model's inputs, of a batch; in training, with a `key`."""
        sequences = None if key is None else batch[SEQUENCES]
        return Inputs(batch["tokens"], batch["positions"], batch["documents"], key=key, sequences=sequences)

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        x, _, auxiliary = module.hidden(self.inputs(batch, key))
        loss, nll = cross_entropy(x, module.output, batch["targets"], batch["weights"], self.z_loss)
        reported = {"loss": nll} | jax.lax.stop_gradient(auxiliary.losses)
        return Sums({"next_token": loss} | auxiliary.losses, reported, auxiliary.statistics)


def means(sums: Mapping[str, Array], counts: Mapping[str, Array]) -> dict[str, Array]:
    """Each sum divided by its count; 0 where nothing was counted."""

    def mean(name: str) -> Array:
        count = counts.get(name, counts["tokens"])
        return sums[name] / jnp.where(count > 0, count, 1)

    return {name: mean(name) for name in sums}
