"""Proximal policy optimisation with a critic: each token has an advantage of its own, by the critic's values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.errors import UserError
from axon.nn import Inputs
from axon.nn.auxiliary import Auxiliary
from axon.train.objective import Batch, NextToken, Sums
from axon.train.policy_gradient import Estimate, Estimator, HostBatch, PolicyObjective, whitened

Critic = Callable[[Array, Inputs], tuple[Array, Auxiliary]]
"""(the policy's last hidden state `batch seq embed`, its inputs) → a value at each position, `batch seq`, and auxiliary
terms."""


@runtime_checkable
class HasCritic(Protocol):
    """A language model with a critic, as `axon.tune.ActorCritic` builds."""

    critic: Critic


@dataclass(frozen=True)
class PPO(PolicyObjective):
    """The clipped policy loss with advantages by generalised advantage estimation (Schulman et al., arXiv:1506.02438,
    equation 16), and in the same step a critic that learns the returns (arXiv:1707.06347, equation 9).

    At a sampled token, V is the critic's value of the text before it, by the weights that sampled; r the answer's
    reward at its last token, 0 before; with "k1" less the divergence at each. With δ = r +
    γ·V_next − V, the advantage is A = δ + γ·λ·A_next, and the return A + V. Advantages are whitened over the sampled
    tokens of the global batch: less their mean, over their standard deviation.

    Args:
        discount: γ. gae_lambda: λ.
        value_weight: of the critic's loss, the mean over sampled tokens of max((V' − R)², (V'' − R)²) / 2: R the
            return, V' the value in training, and V'' the same clipped to V ± `value_clip`.

    Metrics beside a policy's: `value`, the critic's loss; `value_clipped`, the share of tokens whose value is outside
    of the clip; of the rollout `value_explained`, 1 − variance of (return − V) / variance of the return. For models
    with a critic, as `ActorCritic`.
    """

    derived: ClassVar[frozenset[str]] = frozenset({"values", "returns"})

    estimator: Estimator = "k1"
    discount: float = 1.0
    gae_lambda: float = 0.95
    value_weight: float = 0.1
    value_clip: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[0, 1]", "discount", "gae_lambda")
        check_range(self, "(0, inf)", "value_weight", "value_clip")

    def specs(self, batch: int, seq: int) -> Specs:
        own = {name: ArraySpec(("batch", "seq"), (batch, seq), jnp.float32) for name in sorted(self.derived)}
        return {**super().specs(batch, seq), **own}

    def check(self, module: Any) -> None:
        super().check(module)
        if not isinstance(module, HasCritic):
            raise UserError(
                f"PPO needs a model with a critic; build() returns a {type(module).__name__} without `critic`: set "
                "Train.model = @ActorCritic(), and ActorCritic.model to this one"
            )

    # ---- before the step -------------------------------------------------------------------------------------------

    def estimates(self, module: Any, batch: Batch, reference: Any = None) -> dict[str, Array]:
        inputs = NextToken().inputs(batch)
        values = module.critic(module.hidden(inputs)[0], inputs)[0]
        return {"values": values, **super().estimates(module, batch, reference)}

    def learned(self, batch: HostBatch, rewards: np.ndarray, estimate: Estimate) -> tuple[HostBatch, dict[str, float]]:
        estimates, sampled = estimate(batch), batch["weights"] > 0
        values, each = np.asarray(estimates["values"], np.float64), at_last(rewards.ravel(), sampled)
        divergence = self.divergence(batch, estimates)
        advantages = gae(
            each - self.kl * divergence, values, sampled, batch["documents"], self.discount, self.gae_lambda
        )
        returns = np.where(sampled, advantages + values, 0.0)
        spread = np.var(returns[sampled]) if sampled.any() else 0.0
        explained = 1 - float(np.var(advantages[sampled]) / spread) if spread else 0.0
        metrics = {"value_explained": explained, **self.divergence_metrics(divergence, batch)}
        learned = {"advantages": whitened(advantages, sampled), "values": values * sampled, "returns": returns}
        return {name: value.astype(np.float32) for name, value in learned.items()}, metrics

    # ---- the step --------------------------------------------------------------------------------------------------

    def sums(self, module: Any, batch: Batch, key: Array | None = None, **references: Any) -> Sums:
        inputs = NextToken().inputs(batch, key)
        x, _, auxiliary = module.hidden(inputs)
        policy = self.policy_sums(module, x, batch)
        values, own = module.critic(x, inputs)
        loss = jnp.sum(batch["weights"] * self.value_losses(values, batch))
        outside = (jnp.abs(values - batch["values"]) > self.value_clip).astype(jnp.float32)
        metrics = {"value": loss, "value_clipped": jnp.sum(batch["weights"] * lax.stop_gradient(outside))}
        minimised = policy.minimised | {"value": self.value_weight * loss}
        return Sums(minimised, policy.metrics | metrics, maxima=policy.maxima).with_auxiliary(auxiliary + own)

    def value_losses(self, values: Array, batch: Batch) -> Array:
        """The critic's loss of each target, `batch seq`."""
        near = batch["values"] + jnp.clip(values - batch["values"], -self.value_clip, self.value_clip)
        return jnp.maximum(jnp.square(values - batch["returns"]), jnp.square(near - batch["returns"])) / 2


def at_last(rewards: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Each sequence's reward, `batch`, at the last of its `sampled` tokens, `batch seq`; 0 elsewhere."""
    each, rows = np.zeros(sampled.shape), np.flatnonzero(sampled.any(axis=1))
    each[rows, sampled.shape[1] - 1 - np.argmax(sampled[rows, ::-1], axis=1)] = rewards[rows]
    return each


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    sampled: np.ndarray,
    documents: np.ndarray,
    discount: float,
    gae_lambda: float,
) -> np.ndarray:
    """The advantages of `sampled` tokens, each with the next one of its document, all `batch seq`; 0 of others."""
    advantages = np.zeros(rewards.shape)
    value, advantage = np.zeros((2, len(rewards)))  # of the next sampled token; 0 after the last of a document
    for t in reversed(range(rewards.shape[1])):
        if t + 1 < rewards.shape[1]:
            same = documents[:, t] == documents[:, t + 1]
            value, advantage = value * same, advantage * same
        own = rewards[:, t] + discount * value - values[:, t] + discount * gae_lambda * advantage
        value, advantage = np.where(sampled[:, t], (values[:, t], own), (value, advantage))
        advantages[:, t] = np.where(sampled[:, t], own, 0)
    return advantages
