"""KTO: answers that are desirable or not, each by itself, without pairs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.checks import check_range
from axon.nn.auxiliary import Auxiliary
from axon.train.objective import Batch, Sums
from axon.train.preference import REFERENCE, check_language_models
from axon.train.whole_batch import CoupledExamples, Features

DESIRABLE, UNDESIRABLE, MISMATCHED = range(3)
"""The answers of an example, one of the first two: to its prompt; and to another's prompt, for the divergence."""

RATIO = "ratio"


@dataclass(frozen=True)
class KTO(CoupledExamples):
    """λ_D·(1 − σ(β·(r − z))) of a desirable answer, λ_U·(1 − σ(β·(z − r))) of an undesirable one, r = log π/π_ref
    (Ethayarajh et al., arXiv:2402.01306, equation 8).

    z, without a gradient, estimates KL(π ‖ π_ref): the mean of log π/π_ref over the mismatched answers of the global
    batch, or 0 if that is less. The frozen model is `Train.references["reference"]`, as of `DPO`.

    Args:
        beta: β. desirable, undesirable: λ_D and λ_U. The paper has n_D·λ_D / (n_U·λ_U) from 1 to 3/2, where n_D and
            n_U answers are desirable and undesirable.

    Metrics: `accuracy`, the share of answers for which r > z says whether they are desirable; `kl`, z; `chosen` and
    `rejected`, means of β·r over desirable and over undesirable answers.
    """

    references: ClassVar[frozenset[str]] = frozenset({REFERENCE})

    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, inf)", "beta")
        check_range(self, "[0, inf)", "desirable", "undesirable")

    def check_references(self, module: Any, references: Any) -> None:
        check_language_models(*references.values())

    def counts(self, batch: Batch) -> dict[str, Array]:
        each = jnp.sum(self.is_answer(batch).astype(jnp.float32), axis=(0, 1))
        examples = each[DESIRABLE] + each[UNDESIRABLE]
        named = dict.fromkeys(("kto", "loss", "accuracy", "kl"), examples)
        own = {"chosen": each[DESIRABLE], "rejected": each[UNDESIRABLE]}
        return {"tokens": jnp.sum(batch["weights"])} | named | own

    def reference_values(self, name: str, module: Any, batch: Batch) -> Array:
        """The log-probability of each answer, as of `logp`."""
        return self.logp(module, batch)[0]

    def features(
        self, module: Any, batch: Batch, key: Array | None = None, **references: Any
    ) -> tuple[Features, Auxiliary]:
        """`ratio`, log π/π_ref of each answer, `batch example side`."""
        logp, auxiliary = self.logp(module, batch, key)
        return {RATIO: logp - batch[REFERENCE]}, auxiliary

    def coupled(self, features: Features, batch: Batch) -> Sums:
        ratio, real = features[RATIO], self.is_answer(batch)
        matched, is_matched = ratio[..., :MISMATCHED], real[..., :MISMATCHED]
        sign, weight = jnp.array([1.0, -1.0]), jnp.array([self.desirable, self.undesirable])
        kl = divergence(ratio[..., MISMATCHED], real[..., MISMATCHED])
        loss = jnp.sum(jnp.where(is_matched, weight * jax.nn.sigmoid(-self.beta * sign * (matched - kl)), 0))
        rewards = jnp.sum(jnp.where(is_matched, self.beta * matched, 0), axis=(0, 1))
        metrics = {
            "loss": loss,
            "accuracy": jnp.sum(is_matched & (sign * (matched - kl) > 0)).astype(jnp.float32),
            "kl": kl * jnp.sum(is_matched),
            "chosen": rewards[DESIRABLE],
            "rejected": rewards[UNDESIRABLE],
        }
        return Sums({"kto": loss}, lax.stop_gradient(metrics))


def divergence(ratio: Array, real: Array) -> Array:
    """The mean of log π/π_ref of the answers that are `real`, or 0 if that is less; without a gradient."""
    mean = jnp.sum(jnp.where(real, ratio, 0)) / jnp.maximum(jnp.sum(real), 1)
    return lax.stop_gradient(jnp.maximum(mean, 0))
