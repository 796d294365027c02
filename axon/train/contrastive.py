"""Contrastive learning of embeddings, with the texts of the global batch as negatives."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon import axes
from axon.checks import check_range
from axon.nn.auxiliary import Auxiliary
from axon.train.objective import Batch, Sums
from axon.train.whole_batch import CoupledExamples, Features

TEXTS = "texts"
"""The array of a batch of texts in the place of `documents`: 3·n + side where a token is of the n-th example of its
sequence, -1 where it is padding."""

EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class InfoNCE(CoupledExamples):
    """−log (exp(s(q, d⁺)/τ) / Σ_d exp(s(q, d)/τ)), s the cosine of two embeddings, d over the positives and negatives
    of all examples of the global batch (van den Oord et al., arXiv:1807.03748, equation 4).

    An embedding is made of the last hidden states of a text. `TextPairs` makes the batches.

    Args:
        temperature: τ. pooling: "last", the state of the last token, or the "mean" of all.

    Metrics: `accuracy`, the share of queries to which no other text is nearer than their own; `positive`, the mean
    cosine of a query and its text.
    """

    documents: ClassVar[str] = TEXTS

    temperature: float = 0.05
    pooling: Literal["last", "mean"] = "last"

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, inf)", "temperature")

    def counts(self, batch: Batch) -> dict[str, Array]:
        examples = jnp.sum(self.is_answer(batch)[..., 0]).astype(jnp.float32)
        named = dict.fromkeys(("contrastive", "loss", "accuracy", "positive"), examples)
        return {"tokens": jnp.sum(batch["weights"])} | named

    def features(self, module: Any, batch: Batch, key: Array | None = None) -> tuple[Features, Auxiliary]:
        """`embeddings` of length 1, `batch example side embed`: of the query, its text, and perhaps a negative."""
        x, auxiliary = self.hidden(module, batch, key)
        chosen = self.of_answers(batch) if self.pooling == "mean" else self.last_of_answers(batch)
        pooled = axes.einsum("batch seq _text, batch seq.residual _embed -> batch _text _embed", chosen, x)
        pooled = pooled.astype(jnp.float32)
        square = jnp.sum(jnp.square(pooled), axis=-1, keepdims=True)
        unit = pooled / jnp.sqrt(jnp.where(square > 0, square, 1))  # the root's gradient at 0, of no text, is infinite
        return {EMBEDDINGS: unit.reshape(-1, self.room, self.sides, unit.shape[-1])}, auxiliary

    def coupled(self, features: Features, batch: Batch) -> Sums:
        embeddings, real = features[EMBEDDINGS], self.is_answer(batch)
        queries, own = embeddings[..., 0, :], embeddings[..., 1, :]
        texts = axes.shard(embeddings[..., 1:, :], "_all _other _side _embed")
        is_text = axes.shard(real[..., 1:], "_all _other _side")
        scores = jnp.einsum("bne,aose->bnaos", queries, texts, precision=lax.Precision.HIGHEST) / self.temperature
        scores = jnp.where(is_text, scores, -jnp.inf).reshape(*scores.shape[:2], -1)
        positive = jnp.sum(queries * own, axis=-1)
        is_query = real[..., 0]
        scores = jnp.where(is_query[..., None], scores, 0)
        nll = jax.nn.logsumexp(scores, axis=-1) - positive / self.temperature
        nearest = jnp.max(scores, axis=-1) <= positive / self.temperature + 1e-5
        loss = jnp.sum(jnp.where(is_query, nll, 0))
        metrics = {
            "loss": loss,
            "accuracy": jnp.sum(is_query & nearest).astype(jnp.float32),
            "positive": jnp.sum(jnp.where(is_query, positive, 0)),
        }
        return Sums({"contrastive": loss}, lax.stop_gradient(metrics))
