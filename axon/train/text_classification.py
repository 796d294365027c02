"""The objective of a classifier of texts."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from axon.axes import einsum, shard
from axon.errors import UserError
from axon.nn import Param
from axon.train.objective import Batch, NextToken, Objective, Sums

NAMES = ("classification", "loss", "accuracy")


@runtime_checkable
class ClassifiesTexts(Protocol):
    """A language model with a `classifier`, which makes logits of the last hidden state, `embed classes`."""

    classifier: Param


@dataclass(frozen=True)
class TextClassification(Objective):
    """The negative log-likelihood of a text's class, in nats, read at its last token; the metric `accuracy` is the
    share of texts whose most likely class is theirs.

    `LabelledTexts` makes the batches: weights are 1 where a target is the number of a text's class, else 0. For models
    with a `classifier`, as `TextClassifier` builds.
    """

    unit: ClassVar[str] = "text"

    def check(self, module: Any) -> None:
        if not isinstance(module, ClassifiesTexts):
            raise UserError(
                "TextClassification needs a model that classifies texts; build() returns a "
                f"{type(module).__name__} without `classifier`: set Train.model = @TextClassifier(), and "
                "TextClassifier.model to this one"
            )

    def counts(self, batch: Batch) -> dict[str, Array]:
        texts = dict.fromkeys(NAMES, jnp.sum(batch["weights"]))
        return {"tokens": jnp.sum(batch["documents"] >= 0).astype(jnp.float32)} | texts

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        x, _, auxiliary = module.hidden(NextToken().inputs(batch, key))
        logits = einsum("batch seq.residual embed, embed classes -> batch seq classes", x, module.classifier)
        logits, weights = shard(logits.astype(jnp.float32), "batch seq _classes"), batch["weights"]
        own = jnp.arange(logits.shape[-1]) == batch["targets"][..., None]
        nll = -jnp.sum(jnp.where(own, jax.nn.log_softmax(logits), 0), axis=-1)
        loss = jnp.sum(weights * nll)
        right = jnp.sum(weights * (jnp.argmax(logits, axis=-1) == batch["targets"]))
        return Sums({"classification": loss}, {"loss": loss, "accuracy": right}).with_auxiliary(auxiliary)
