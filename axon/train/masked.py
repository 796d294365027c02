"""The objective of BERT: tokens that are masked, predicted from those around them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.checks import check_range
from axon.errors import UserError
from axon.train.objective import Batch, NextToken, Objective, Sums
from axon.train.random_words import random_words

NAMES = ("masked_token", "loss")


@runtime_checkable
class MasksTokens(Protocol):
    """A module that this objective trains: it gives `batch places vocab` of hidden states `batch places embed`."""

    masked_logits: Callable[[Array], Array]


@dataclass(frozen=True)
class MaskedToken(Objective):
    """The negative log-likelihood of masked tokens, in nats (Devlin et al., arXiv:1810.04805, section 3.1).

    Of each sequence the share `rate` of its real tokens is drawn, anew in each step: of these `masked` become the mask
    id, `replaced` a random id, and the others stay. The draw follows from the run's seed, the step and the sequence's
    number in the global batch: it depends neither on the layout nor on microbatches, and a resumed run draws the same.
    Evaluation draws the same for every batch.

    Args:
        mask_id: the id that stands for a masked token; the last one of the model's vocabulary by default, which must
            then have one more than the tokenizer.
    """

    unit: ClassVar[str] = "predicted token"

    rate: float = 0.15
    masked: float = 0.8
    replaced: float = 0.1
    mask_id: int | None = None

    def __post_init__(self):
        check_range(self, "(0, 1)", "rate")
        check_range(self, "[0, 1]", "masked", "replaced")
        check_range(self, "[0, 2**31)", "mask_id")
        if self.masked + self.replaced > 1:
            raise UserError(f"MaskedToken: masked {self.masked} and replaced {self.replaced} add up to more than 1")

    def check(self, module: Any) -> None:
        if not isinstance(module, MasksTokens):
            raise UserError(
                "MaskedToken needs a model with masked_logits, as models.bert.Bert with head = True; build() returns a "
                f"{type(module).__name__}"
            )

    def reserved_ids(self, seq: int) -> int:
        return int(self.mask_id is None)

    def check_vocab(self, vocab: int, seq: int) -> None:
        if self.mask_id is not None and self.mask_id >= vocab:
            raise UserError(f"MaskedToken.mask_id is {self.mask_id}, and the model's vocab {vocab}: must be below that")

    def draw(self, module: Any, batch: Batch, key: Array) -> Batch:
        """The batch with masked `tokens`; and of each sequence `places`, their `targets`, and whether they are
        `counted`, as 1 or 0: `batch places`."""
        tokens, real = (axes.shard(batch[name], "batch _seq") for name in ("tokens", "weights"))
        most = max(1, round(self.rate * tokens.shape[1]))
        wanted = jnp.round(self.rate * jnp.sum(real > 0, axis=1, keepdims=True)).astype(jnp.int32)
        scores = jnp.where(real > 0, random_words(key, "places", batch) >> 1, 0).astype(jnp.int32)
        best, places = jax.lax.top_k(scores, most)
        counted = (jnp.arange(most) < wanted) & (best > 0)
        least = jnp.min(jnp.where(counted, best, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
        masked = jnp.where(scores >= least, self._hidden(module, tokens, key, batch), tokens)
        drawn = {"places": places, "targets": axes.at_places(tokens, places), "counted": counted.astype(jnp.float32)}
        return {**batch, **drawn, "tokens": axes.shard(masked, "batch seq")}

    def _hidden(self, module: Any, tokens: Array, key: Array, batch: Batch) -> Array:
        """What would stand in place of each token."""
        share = random_words(key, "how", batch) / jnp.float32(2**32)
        other = (random_words(key, "ids", batch) % jnp.uint32(module.vocab)).astype(tokens.dtype)
        mask = module.vocab - 1 if self.mask_id is None else self.mask_id
        return jnp.where(share < self.masked, mask, jnp.where(share < self.masked + self.replaced, other, tokens))

    def counts(self, batch: Batch) -> dict[str, Array]:
        return super().counts(batch) | dict.fromkeys(NAMES, jnp.sum(batch["counted"]))

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        x, auxiliary = module.hidden(NextToken().inputs(batch, key))
        logits = module.masked_logits(axes.at_places(x, batch["places"]))
        loss = jnp.sum(batch["counted"] * _nll(logits, batch["targets"]))
        return Sums({"masked_token": loss}, {"loss": loss}).with_auxiliary(auxiliary)


def _nll(logits: Array, targets: Array) -> Array:
    """`batch places`, in nats, of `logits[batch places vocab]`."""
    ids = axes.shard(jnp.arange(logits.shape[-1]), "vocab")
    label = jnp.sum(jnp.where(ids == targets[..., None], logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - label
