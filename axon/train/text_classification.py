"""The objective of a classifier of texts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from axon.axes import ArraySpec, add, by_sequence, einsum, shard
from axon.axes.array_spec import Specs
from axon.errors import UserError
from axon.nn import Inputs, Param
from axon.nn.auxiliary import Auxiliary
from axon.train.objective import Batch, BySequence, NextToken, Sums

NAMES = ("classification", "loss", "accuracy")

TYPES = "types"
"""Array of a batch, `batch seq` int32: the type of each token, 1 in the second text of a pair, else 0."""


@runtime_checkable
class ClassifiesTexts(Protocol):
    """A model of text with a `classifier`, which makes logits of the last hidden state, `embed classes`."""

    classifier: Param


@runtime_checkable
class PoolsTexts(ClassifiesTexts, Protocol):
    """An encoder, whose classes are read at a text's first token, of what `pooled` makes of the hidden states; to
    `hidden` the types of tokens are given too."""

    classifier_bias: Param
    hidden: Callable[[Inputs, Array | None], Any]
    pooled: Callable[[Array, Inputs], Array]


@dataclass(frozen=True)
class TextClassification(BySequence):
    """The negative log-likelihood of a text's class, in nats, read at its last token, or at the first of one that an
    encoder reads (Devlin et al., arXiv:1810.04805, section 4.1); the metric `accuracy` is the share of texts whose most
    likely class is theirs.

    `LabelledTexts` makes the batches: weights are 1 at a text's last token, where the target is its class; an encoder
    is told the `types` of tokens. For models with a `classifier`, as `TextClassifier` builds.
    """

    unit: ClassVar[str] = "text"

    def specs(self, batch: int, seq: int) -> Specs:
        return {**super().specs(batch, seq), TYPES: ArraySpec(("batch", "seq"), (batch, seq), jnp.int32)}

    def check(self, module: Any) -> None:
        if not isinstance(module, ClassifiesTexts):
            raise UserError(
                "TextClassification needs a model that classifies texts; build() returns a "
                f"{type(module).__name__} without `classifier`: set Train.model = @TextClassifier(), and "
                "TextClassifier.model to this one"
            )

    def draw(self, module: Any, batch: Batch, key: Array) -> Batch:
        """The batch, with each text's class where the module is read."""
        if not isinstance(module, PoolsTexts):
            return batch
        arrays = (batch[name] for name in ("targets", "weights", "positions", "documents"))
        targets, weights = by_sequence(jax.vmap(_at_first_tokens), *arrays)
        return {**batch, "targets": shard(targets, "batch seq"), "weights": shard(weights, "batch seq")}

    def counts(self, batch: Batch) -> dict[str, Array]:
        texts = dict.fromkeys(NAMES, jnp.sum(batch["weights"]))
        return {"tokens": jnp.sum(batch["documents"] >= 0).astype(jnp.float32)} | texts

    def values(self, module: Any, batch: Batch, key: Array | None = None) -> tuple[tuple[Array, Array], Auxiliary]:
        """The loss of each token, were it the one that is read, and whether its class would be right: `batch seq`."""
        inputs = NextToken().inputs(batch, key)
        told = (batch.get(TYPES),) if isinstance(module, PoolsTexts) else ()
        x, *_, auxiliary = module.hidden(inputs, *told)
        logits = _logits(module, x, inputs)
        own = jnp.arange(logits.shape[-1]) == batch["targets"][..., None]
        nll = -jnp.sum(jnp.where(own, jax.nn.log_softmax(logits), 0), axis=-1)
        return (nll, jnp.argmax(logits, axis=-1) == batch["targets"]), auxiliary

    def total(self, values: tuple[Array, Array], batch: Batch) -> Sums:
        loss, right = (jnp.sum(batch["weights"] * one) for one in values)
        return Sums({"classification": loss}, {"loss": loss, "accuracy": right})


def _logits(module: Any, x: Array, inputs: Inputs) -> Array:
    """`batch seq classes`, float32 at least, of the last hidden states."""
    encodes = isinstance(module, PoolsTexts)
    x = module.pooled(x, inputs) if encodes else x
    logits = einsum("batch seq.residual embed, embed classes -> batch seq classes", x, module.classifier)
    logits = (
        add("batch seq classes, classes -> batch seq classes", logits, module.classifier_bias) if encodes else logits
    )
    return shard(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), "batch seq _classes")


def _at_first_tokens(targets: Array, weights: Array, positions: Array, documents: Array) -> tuple[Array, Array]:
    """Targets and weights of a sequence, each `seq`, of which a document's are moved to its first token."""
    own = jnp.maximum(documents, 0)
    classes = jnp.zeros_like(targets).at[own].add(jnp.where(weights > 0, targets, 0))[own]
    each = jnp.zeros_like(weights).at[own].add(weights)[own]
    return classes, jnp.where((positions == 0) & (documents >= 0), each, 0)
