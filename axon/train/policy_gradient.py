"""Policy gradients: a model learns from answers that it sampled and from how good each one was."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.composition import ONE_BIT, REPLICAS, STAGES, Part
from axon.errors import UserError
from axon.nn import token_nll
from axon.train.objective import Batch, NextToken, Objective, Sums
from axon.train.preference import REFERENCE

SAMPLED = {"logprobs": jnp.float32, "advantages": jnp.float32}
"""The arrays of a batch of sampled answers beside those of text, each `batch seq`, and their dtypes: of each target
that is a token of an answer the log-probability by which it was sampled, in nats, and the answer's advantage."""

LARGEST_LOG_RATIO = 30.0
"""A larger log-ratio counts as this one: e³⁰ times an advantage of 0 is 0, and infinity times 0 would be NaN."""

HostBatch = dict[str, np.ndarray]
"""Arrays of a global batch, before they are placed."""

Estimate = Callable[[HostBatch], Mapping[str, np.ndarray]]

Advantage = Literal["group", "mean", "leave_one_out", "batch"]
Ratio = Literal["token", "sequence", "weight"]
Mean = Literal["sequence", "token", "constant"]
Estimator = Literal["k1", "k3"]


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """−min(ρ·A, clip(ρ, 1 − `clip_low`, 1 + `clip_high`)·A) of each sampled token (PPO, Schulman et al.,
    arXiv:1707.06347, equation 7), A its advantage and ρ = π / π_sampler; and what has become of that since.

    π is the model's own distribution, before temperature and filters. `Rollouts` makes its batches, in which each
    answer is a document of its own. Subclasses say what the advantage is: `PolicyGradient`, `axon.train.ppo.PPO`.

    Args:
        ratio: "token": ρ of a token alone; "sequence": the geometric mean of those of the answer; "weight": a constant
            weight, clip(ρ)·A of −log π, so that a clipped token still has a gradient.
        clip_low, clip_high: see above.
        mean: over what the loss is one: "sequence", of each answer its tokens' mean, of these the mean; "token", over
            all sampled tokens of the global batch; "constant", the sum over the number of answers times `constant`.
        kl: β of the divergence from `Train.references["reference"]`; at 0 there is no frozen model. estimator: "k3"
            adds β·(π_ref/π − log(π_ref/π) − 1) to a token's loss; "k1" subtracts β·log(π_sampler/π_ref) from its
            reward, and so from the advantages of it and of the tokens before it.
        entropy: α: subtracts α·log π from a token's advantage, the gradient of the entropy at that token.
        answers: room for so many answers in a sequence.

    Metrics: `loss`, the mean of −log π over the sampled tokens, which of tokens that π sampled estimates its entropy,
    and of held-out data is that of right answers; `policy`, what is minimised but for auxiliary losses; `clipped`, the
    share of tokens whose ratio is outside of the clip; `kl`, of "k3" without β, with "k1" of the rollout the mean of
    log(π_sampler/π_ref); `logprob_gap`, the largest |log π − log
    π_sampler| of the batch, in nats, which is rounding where the weights are those that sampled.
    """

    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    mean: Mean = "token"
    constant: float = 1.0
    kl: float = 0.0
    estimator: Estimator = "k3"
    entropy: float = 0.0
    answers: int = 8

    def __post_init__(self):
        check_range(self, "[0, 1]", "clip_low")
        check_range(self, "[0, inf)", "clip_high", "kl", "entropy")
        check_range(self, "(0, inf)", "constant")
        check_range(self, "[1, 2**16)", "answers")

    @property
    def references(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The frozen model that the divergence is from, if there is one."""
        return frozenset({REFERENCE} if self.kl else ())

    def specs(self, batch: int, seq: int) -> Specs:
        own = {name: ArraySpec(("batch", "seq"), (batch, seq), dtype) for name, dtype in SAMPLED.items()}
        return {**super().specs(batch, seq), **own}

    def draw(self, module: Any, batch: Batch, key: Array) -> Batch:
        """The batch; of held-out text, in which nothing was sampled, with zeros for the arrays that it lacks."""
        missing = self.specs(1, 1).keys() - batch.keys()
        return {**batch, **dict.fromkeys(sorted(missing), jnp.zeros_like(batch["weights"]))}

    def check(self, module: Any) -> None:
        NextToken().check(module)

    @property
    def asks_before(self) -> bool:
        return super().asks_before or self.rewards_kl

    @property
    def rewards_kl(self) -> bool:
        """Whether the divergence is a part of the rewards."""
        return bool(self.kl) and self.estimator == "k1"

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        if not self.asks_before:
            return ()
        why, name = "what it estimates before the step is by one set of weights that is whole", type(self).__name__
        part = f"Train.objective = {name}" + (", with estimator 'k1'" if self.rewards_kl else "")
        remedy = "use an objective without a critic, as GRPO, with estimator 'k3'"
        return (Part(part, remedy, excludes={STAGES: why, REPLICAS: why, ONE_BIT: why}),)

    def check_references(self, module: Any, references: Any) -> None:
        for one in references.values():
            NextToken().check(one)

    def check_group(self, samples: int, field: str) -> None:
        """Raise `UserError` for advantages that so few answers to a prompt do not have; `field` says how many."""
        return

    @abstractmethod
    def learned(self, batch: HostBatch, rewards: np.ndarray, estimate: Estimate) -> tuple[HostBatch, dict[str, float]]:
        """The arrays `batch seq` of a batch that follow from the rewards of its answers, as `advantages`; and metrics.

        Args:
            batch: a global batch of text, with `logprobs`; each of its sequences has one answer.
            rewards: `prompts samples`, of its sequences in order; NaN: the answer has none, and weights of 0.
            estimate: of a batch what `estimates` says by the weights before the step, as NumPy arrays `batch seq`.
        """

    def estimates(self, module: Any, batch: Batch, reference: Any = None) -> dict[str, Array]:
        """What `learned` needs of a model, by name, `batch seq`: with "k1" log-probabilities of the frozen one."""
        return {REFERENCE: frozen_logp(reference, batch)} if self.rewards_kl else {}

    def divergence(self, batch: HostBatch, estimates: Mapping[str, np.ndarray]) -> np.ndarray:
        """log(π_sampler/π_ref) of each sampled token, `batch seq`; 0 of others, and where it is no part of rewards."""
        if not self.rewards_kl:
            return np.zeros(batch["weights"].shape)
        return np.where(batch["weights"] > 0, batch["logprobs"] - estimates[REFERENCE], 0.0)

    def divergence_metrics(self, divergence: np.ndarray, batch: HostBatch) -> dict[str, float]:
        """The mean of `divergence` over the sampled tokens, where it is a part of rewards."""
        tokens = np.sum(batch["weights"] > 0)
        return {"kl": float(np.sum(divergence) / max(tokens, 1))} if self.rewards_kl else {}

    def counts(self, batch: Batch) -> dict[str, Array]:
        tokens = jnp.sum(batch["weights"])
        answers = jnp.sum(self._of_answers(batch["weights"], batch) > 0).astype(jnp.float32)
        policy = {"token": tokens, "sequence": answers, "constant": answers * self.constant}
        return {"tokens": tokens, "policy": policy[self.mean]}

    def reference_values(self, name: str, module: Any, batch: Batch) -> Array | None:
        """The log-probability of each target, `batch seq`, where the divergence is a part of the loss."""
        return None if self.rewards_kl else frozen_logp(module, batch)

    def sums(self, module: Any, batch: Batch, key: Array | None = None, **references: Any) -> Sums:
        x, _, auxiliary = module.hidden(NextToken().inputs(batch, key))
        return self.policy_sums(module, x, batch).with_auxiliary(auxiliary)

    def policy_sums(self, module: Any, x: Array, batch: Batch) -> Sums:
        """The sums of the policy's loss, of its last hidden state `x`."""
        weights, logp = batch["weights"], -token_nll(x, module.output, batch["targets"])[0]
        beside = batch.get(REFERENCE)
        loss = jnp.sum(self.scale(batch) * self.token_losses(logp, batch, beside))
        reported = {"loss": -logp, "clipped": self._is_clipped(logp, batch)}
        reported |= {} if beside is None else {"kl": _k3(logp, beside)}
        means = {name: jnp.sum(weights * value) for name, value in reported.items()}
        gap = jnp.max(jnp.where(weights > 0, jnp.abs(logp - batch["logprobs"]), 0))
        maxima = lax.stop_gradient({"logprob_gap": gap})
        return Sums({"policy": loss}, {"policy": loss} | means, maxima=maxima)

    def token_losses(self, logp: Array, batch: Batch, reference: Array | None = None) -> Array:
        """The loss of each target, `batch seq`, from its log-probability by the model and by the frozen one."""
        advantages = batch["advantages"] - self.entropy * lax.stop_gradient(logp)
        ratio, clipped = self._ratios(logp, batch)
        if self.ratio == "weight":
            losses = -lax.stop_gradient(clipped) * advantages * logp
        else:
            losses = -jnp.minimum(ratio * advantages, clipped * advantages)
        if reference is not None:
            losses += self.kl * _k3(logp, reference)
        return losses

    def scale(self, batch: Batch) -> Array:
        """What a target's loss is multiplied by before the sum over the batch is divided by the count of `policy`."""
        weights = batch["weights"]
        return weights / self._lengths(batch) if self.mean == "sequence" else weights

    def _ratios(self, logp: Array, batch: Batch) -> tuple[Array, Array]:
        """π / π_sampler as `ratio` says, `batch seq`, and the same clipped."""
        log_ratio = logp - batch["logprobs"]
        if self.ratio == "sequence":
            log_ratio = self._spread(self._of_answers(batch["weights"] * log_ratio, batch), batch) / self._lengths(
                batch
            )
        ratio = jnp.exp(jnp.minimum(log_ratio, LARGEST_LOG_RATIO))
        return ratio, jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)

    def _is_clipped(self, logp: Array, batch: Batch) -> Array:
        ratio, clipped = self._ratios(logp, batch)
        return (ratio != clipped).astype(jnp.float32)

    def _members(self, batch: Batch) -> Array:
        """Whether a target is of an answer of its sequence, `batch seq answer`."""
        return batch["documents"][..., None] == jnp.arange(self.answers)

    def _of_answers(self, values: Array, batch: Batch) -> Array:
        """Sums of `values[batch seq]` over each answer, `batch answer`."""
        return jnp.sum(jnp.where(self._members(batch), values[..., None], 0), axis=1)

    def _spread(self, values: Array, batch: Batch) -> Array:
        """Of `values[batch answer]` that of the answer of each target, `batch seq`."""
        return jnp.sum(jnp.where(self._members(batch), values[:, None], 0), axis=2)

    def _lengths(self, batch: Batch) -> Array:
        """Tokens of the answer of each target, `batch seq`, at least 1."""
        return jnp.maximum(self._spread(self._of_answers(batch["weights"], batch), batch), 1)


def frozen_logp(module: Any, batch: Batch) -> Array:
    """The log-probability of each target by a frozen model, `batch seq`, in nats."""
    hidden = module.hidden(NextToken().inputs(batch))[0]
    return lax.stop_gradient(-token_nll(hidden, module.output, batch["targets"])[0])


def whitened(values: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The values at `real` places, less their mean, over their standard deviation; 0 elsewhere, and where all are the
    same."""
    own = values[real]
    if not len(own) or np.min(own) == np.max(own):  # equal ones: no mean of theirs is rounded
        return np.zeros_like(values)
    return np.where(real, values - np.mean(own), 0.0) / np.std(own)


def _k3(logp: Array, reference: Array) -> Array:
    """π_ref/π − log(π_ref/π) − 1, an estimate of KL(π‖π_ref) that is never negative (Schulman 2020)."""
    difference = reference - logp
    return jnp.exp(difference) - difference - 1


@dataclass(frozen=True)
class PolicyGradient(PolicyObjective):
    """The advantage of an answer, of its reward beside others', is that of each of its tokens. The presets below are
    named after the papers; every field can be set on each of them.

    Args:
        advantage: of the reward r of one of a prompt's answers. "group": (r − mean) / standard deviation, both of the
            prompt's answers; "mean": r − mean; "leave_one_out": r − the mean of the prompt's other answers; "batch": as
            "group", over all answers of the global batch. 0 where all rewards are the same.
    """

    advantage: Advantage = "group"

    def check_group(self, samples: int, field: str) -> None:
        if samples == 1 and self.advantage != "batch":
            raise UserError(
                f"{field} is 1, and {type(self).__name__}.advantage is {self.advantage!r}: a single answer is compared "
                f"with none, so that nothing would be learned. Set {field} to at least 2, or advantage to 'batch'"
            )

    def learned(self, batch: HostBatch, rewards: np.ndarray, estimate: Estimate) -> tuple[HostBatch, dict[str, float]]:
        divergence = self.divergence(batch, estimate(batch) if self.asks_before else {})
        following = np.cumsum(divergence[:, ::-1], axis=1)[:, ::-1]  # a sequence has one answer
        advantages = self.token_advantages(rewards, self.kl * following, batch["weights"] > 0)
        return {"advantages": advantages.astype(np.float32)}, self.divergence_metrics(divergence, batch)

    def token_advantages(self, rewards: np.ndarray, penalties: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """The advantages of tokens, `batch seq`: those of their answers, less the `penalties` of the divergence."""
        return np.where(sampled, self.advantages(rewards).reshape(-1, 1) - penalties, 0.0)

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """The advantage of each answer, from rewards `prompts samples`; NaN: it has none, and no part in those of
        others."""
        axis = None if self.advantage == "batch" else 1
        real = ~np.isnan(rewards)
        count = np.maximum(np.sum(real, axis=axis, keepdims=True), 1)
        mean = np.sum(rewards, axis=axis, keepdims=True, where=real) / count
        highest = np.max(rewards, axis=axis, keepdims=True, where=real, initial=-np.inf)
        lowest = np.min(rewards, axis=axis, keepdims=True, where=real, initial=np.inf)
        centred = np.where(real & (highest > lowest), rewards - mean, 0.0)  # equal ones: no mean of theirs is rounded
        if self.advantage == "mean":
            return centred
        if self.advantage == "leave_one_out":
            return centred * count / np.maximum(count - 1, 1)
        deviation = np.sqrt(np.sum(centred**2, axis=axis, keepdims=True) / count)
        return centred / np.where(deviation > 0, deviation, 1)


@dataclass(frozen=True)
class GRPO(PolicyGradient):
    """Group relative policy optimisation (Shao et al., arXiv:2402.03300, equations 3 and 4; there β is 0.04)."""

    mean: Mean = "sequence"


@dataclass(frozen=True)
class DrGRPO(PolicyGradient):
    """GRPO without its two biases, the deviation and an answer's length (Liu et al., arXiv:2503.20783, section 3.2).

    `constant` is the same for all answers, as the most tokens that one may have."""

    advantage: Advantage = "mean"
    mean: Mean = "constant"


@dataclass(frozen=True)
class DAPO(PolicyGradient):
    """A higher clip above than below, and a mean over tokens (Yu et al., arXiv:2503.14476, equation 8). Its reward of
    long answers is `axon.tune.rewards.Overlong`, its dynamic sampling `Rollouts.redraws`."""

    clip_high: float = 0.28


@dataclass(frozen=True)
class RLOO(PolicyGradient):
    """REINFORCE with the other answers' mean for a baseline (Ahmadian et al., arXiv:2402.14740, equation 7): the
    advantage times −log π of the whole answer, and no ratio: clipped to 1."""

    advantage: Advantage = "leave_one_out"
    ratio: Ratio = "weight"
    clip_low: float = 0.0
    clip_high: float = 0.0
    mean: Mean = "constant"


@dataclass(frozen=True)
class ReinforcePlusPlus(PolicyGradient):
    """PPO's clip, and as a token's advantage the answer's reward less β·Σ log(π_sampler/π_ref) of it and of those after
    it, whitened over the sampled tokens of the global batch (Hu et al., arXiv:2501.03262, equations 8 to 10); a single
    answer to a prompt will do."""

    advantage: Advantage = "batch"
    estimator: Estimator = "k1"

    def token_advantages(self, rewards: np.ndarray, penalties: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        if self.advantage != "batch":
            return super().token_advantages(rewards, penalties, sampled)
        return whitened(np.where(sampled, rewards.reshape(-1, 1) - penalties, 0.0), sampled)


@dataclass(frozen=True)
class GSPO(PolicyGradient):
    """Ratio and clip of whole answers (Zheng et al., arXiv:2507.18071, equations 5 to 7, and section 5.1)."""

    ratio: Ratio = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    mean: Mean = "sequence"


@dataclass(frozen=True)
class CISPO(PolicyGradient):
    """Clipped importance weights, by which no token loses its gradient (MiniMax-M1, arXiv:2506.13585, equations 4 and
    5), without a lower bound; the upper one is tuned."""

    ratio: Ratio = "weight"
    clip_low: float = 1.0
    clip_high: float = 1.0
