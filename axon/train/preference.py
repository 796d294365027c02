"""Preferences: of two answers to a prompt, one is chosen; the objectives that make it likelier, or score it higher."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array

from axon.axes import ArraySpec, einsum
from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.errors import UserError
from axon.nn import token_nll
from axon.nn.auxiliary import Auxiliary
from axon.nn.capabilities import HasDims
from axon.nn.param import Param
from axon.train.objective import TEXT, Batch, BySequence, NextToken, Objective, Sums

ANSWERS = "answers"
"""What a batch of pairs has in the place of `documents`: 2·p where a token is of the chosen, 2·p + 1 where it is of the
rejected text of the p-th pair of its sequence, -1 where it is padding; of examples with n sides, n·p + side."""

REFERENCE = "reference"
"""Name of the frozen model that answers are compared by, and in a batch of what it says of them."""

PAIR = "pair"
"""The unit of an objective whose loss is a mean over pairs of answers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sides:
    """A number for each answer of a batch: `chosen` and `rejected`, each `batch pairs`."""

    chosen: Array
    rejected: Array

    @property
    def difference(self) -> Array:
        return self.chosen - self.rejected


def sides_of(values: Array) -> Sides:
    """`batch pairs side` as chosen and rejected."""
    return Sides(values[..., 0], values[..., 1])


class AnswerObjective(Objective):
    """The base of objectives over answers of which several are in one sequence, and share one forward; `sides` of them
    are an example, perhaps without tokens."""

    documents: ClassVar[str] = ANSWERS
    """Name of the array of a batch that says which answer a token is of."""
    sides: ClassVar[int] = 2

    @property
    @abstractmethod
    def room(self) -> int:
        """Examples that a sequence may have."""

    def specs(self, batch: int, seq: int) -> Specs:
        """As of text, `answers` in the place of `documents`; weights are 1 where the target is of the answer."""
        names = [self.documents if name == "documents" else name for name in TEXT]
        dtypes = zip(names, TEXT.values(), strict=True)
        return {name: ArraySpec(("batch", "seq"), (batch, seq), dtype) for name, dtype in dtypes}

    def hidden(self, module: Any, batch: Batch, key: Array | None = None) -> Any:
        """The last layer's output `batch seq embed`, and the auxiliary terms: no answer attends to another."""
        x, _, auxiliary = module.hidden(NextToken().inputs(batch, key, self.documents))
        return x, auxiliary

    def of_answers(self, batch: Batch) -> Array:
        """Whether a token is of an answer, `batch seq answer`, `sides`·`room` of them."""
        return batch[self.documents][..., None] == jnp.arange(self.sides * self.room)

    def last_of_answers(self, batch: Batch) -> Array:
        """Whether a token is the last of an answer, `batch seq answer`."""
        own, positions = self.of_answers(batch), batch["positions"][..., None]
        return own & (positions == jnp.max(jnp.where(own, positions, -1), axis=1, keepdims=True))

    def summed(self, values: Array, batch: Batch) -> Array:
        """Sums of `values[batch seq]` over the tokens of each answer, `batch example side`."""
        sums = jnp.sum(jnp.where(self.of_answers(batch), values[..., None], 0), axis=1)
        return sums.reshape(-1, self.room, self.sides)

    def is_answer(self, batch: Batch) -> Array:
        """Whether there is such an answer, `batch example side`."""
        return self.summed(batch["weights"], batch) > 0

    def logp(self, module: Any, batch: Batch, key: Array | None = None) -> tuple[Array, Any]:
        """The log-probability of each answer given its prompt, in nats, `batch example side`, where there is none a
        number below 0; and the auxiliary terms."""
        x, auxiliary = self.hidden(module, batch, key)
        nll, _ = token_nll(x, module.output, batch["targets"])
        return jnp.where(self.is_answer(batch), self.summed(-batch["weights"] * nll, batch), -1.0), auxiliary


@dataclass(frozen=True)
class Pairwise(AnswerObjective, BySequence):
    """The base of objectives over pairs of answers.

    Args:
        pairs: room for so many pairs in a sequence.
    """

    unit: ClassVar[str] = PAIR

    pairs: int = 8

    def __post_init__(self):
        check_range(self, "[1, 2**16)", "pairs")

    @property
    def room(self) -> int:
        return self.pairs

    def counts(self, batch: Batch) -> dict[str, Array]:
        real = jnp.sum(self.is_pair(batch))
        named = ("preference", "loss", "accuracy", "margin", "chosen", "rejected")
        return {"tokens": jnp.sum(batch["weights"]), **dict.fromkeys(named, real)}

    def is_pair(self, batch: Batch) -> Array:
        """Whether there is such a pair, `batch pairs`."""
        return self.is_answer(batch)[..., 0]

    def is_right(self, sides: Sides, batch: Batch) -> Array:
        """Whether the answers of each pair compare as the pair says, `batch pairs`."""
        return sides.difference > 0

    def total(self, values: tuple[Array, Sides], batch: Batch) -> Sums:
        """The sums over pairs of a loss and of what the answers are compared by, each `batch pairs`."""
        (loss, sides), real = values, self.is_pair(batch)
        total = jnp.sum(jnp.where(real, loss, 0))
        metrics = {
            "loss": loss,
            "accuracy": self.is_right(sides, batch).astype(jnp.float32),
            "margin": sides.difference,
            "chosen": sides.chosen,
            "rejected": sides.rejected,
        }
        sums = {name: jnp.sum(jnp.where(real, value, 0)) for name, value in metrics.items()}
        return Sums({"preference": total}, sums)


@dataclass(frozen=True)
class Answers:
    """Of the answers of a batch: `logp`, the log-probabilities of their tokens given the prompt, summed, in nats;
    `tokens`, how many those are; `reference`, `logp` by the frozen model, where the objective has one."""

    logp: Sides
    tokens: Sides
    reference: Sides | None = None

    @property
    def mean(self) -> Sides:
        """`logp` a token."""
        return Sides(self.logp.chosen / self.tokens.chosen, self.logp.rejected / self.tokens.rejected)

    @property
    def ratio(self) -> Sides:
        """log π / π_ref."""
        assert self.reference is not None
        return Sides(self.logp.chosen - self.reference.chosen, self.logp.rejected - self.reference.rejected)


@dataclass(frozen=True)
class Preference(Pairwise):
    """The base of objectives of the log-probabilities of both answers, which differ in `compared` alone.

    Metrics, means over pairs: `accuracy`, the share in which the chosen answer compares as the better one; `margin`, by
    how much; `chosen` and `rejected`, what is compared.
    """

    def check(self, module: Any) -> None:
        check_language_models(module)

    def check_references(self, module: Any, references: Any) -> None:
        check_language_models(*references.values())

    @abstractmethod
    def compared(self, answers: Answers) -> tuple[Array, Sides]:
        """The loss of each pair, `batch pairs`, and what its answers are compared by."""

    def reference_values(self, name: str, module: Any, batch: Batch) -> Array:
        """The log-probability of each answer, as of `logp`."""
        return self.logp(module, batch)[0]

    def values(
        self, module: Any, batch: Batch, key: Array | None = None, **references: Any
    ) -> tuple[tuple[Array, Sides], Auxiliary]:
        logp, auxiliary = self.logp(module, batch, key)
        beside = sides_of(batch[REFERENCE]) if REFERENCE in self.references else None
        tokens = sides_of(jnp.maximum(self.summed(batch["weights"], batch), 1))
        return self.compared(Answers(sides_of(logp), tokens, beside)), auxiliary


def check_language_models(*modules: Any) -> None:
    """Raise `UserError` for a module whose answers have no log-probability."""
    for module in modules:
        NextToken().check(module)


@dataclass(frozen=True)
class DPO(Preference):
    """−log σ(β·Δ), Δ the difference of log π/π_ref of the two answers (Rafailov et al., arXiv:2305.18290, equation 7).

    The frozen model is `Train.references["reference"]`: the one that the run starts from, or `AdaptersOff()`.

    Args:
        beta: β. smoothing: ε of (1 − ε)·(−log σ(β·Δ)) + ε·(−log σ(−β·Δ)), the share of labels that are wrong
            (conservative DPO, Mitchell 2023).
    """

    references: ClassVar[frozenset[str]] = frozenset({REFERENCE})

    beta: float = 0.1
    smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, inf)", "beta")
        check_range(self, "[0, 0.5)", "smoothing")

    def compared(self, answers: Answers) -> tuple[Array, Sides]:
        rewards = _scaled(answers.ratio, self.beta)
        kept, swapped = (-jax.nn.log_sigmoid(sign * rewards.difference) for sign in (1, -1))
        return (1 - self.smoothing) * kept + self.smoothing * swapped, rewards


@dataclass(frozen=True)
class IPO(Preference):
    """(Δ − 1 / (2·τ))², Δ as of `DPO` (Azar et al., arXiv:2310.12036, equation 17); `beta` is τ."""

    references: ClassVar[frozenset[str]] = frozenset({REFERENCE})

    beta: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, inf)", "beta")

    def compared(self, answers: Answers) -> tuple[Array, Sides]:
        return jnp.square(answers.ratio.difference - 1 / (2 * self.beta)), answers.ratio


@dataclass(frozen=True)
class SimPO(Preference):
    """−log σ(β·Δ − γ), Δ the difference of the mean log-probabilities a token (Meng et al., arXiv:2405.14734, equation
    6). No frozen model."""

    beta: float = 2.0
    gamma: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, inf)", "beta")
        check_range(self, "[0, inf)", "gamma")

    def compared(self, answers: Answers) -> tuple[Array, Sides]:
        rewards = _scaled(answers.mean, self.beta)
        return -jax.nn.log_sigmoid(rewards.difference - self.gamma), rewards


@dataclass(frozen=True)
class ORPO(Preference):
    """−m_chosen − λ·log σ(Δ): m the mean log-probability a token, Δ the difference of log (eᵐ / (1 − eᵐ)) (Hong et al.,
    arXiv:2403.07691, equation 6). No frozen model. `weight` is λ."""

    weight: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[0, inf)", "weight")

    def compared(self, answers: Answers) -> tuple[Array, Sides]:
        mean = answers.mean
        odds = Sides(_log_odds(mean.chosen), _log_odds(mean.rejected))
        return -mean.chosen - self.weight * jax.nn.log_sigmoid(odds.difference), odds


@dataclass(frozen=True)
class CPO(Preference):
    """−log σ(β·Δ) − λ·log π(chosen), Δ the difference of log-probabilities (Xu et al., arXiv:2401.08417, equations 4 to
    6). No frozen model. `weight` is λ."""

    beta: float = 0.1
    weight: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, inf)", "beta")
        check_range(self, "[0, inf)", "weight")

    def compared(self, answers: Answers) -> tuple[Array, Sides]:
        rewards = _scaled(answers.logp, self.beta)
        return -jax.nn.log_sigmoid(rewards.difference) - self.weight * answers.logp.chosen, rewards


def _scaled(sides: Sides, factor: float) -> Sides:
    return Sides(factor * sides.chosen, factor * sides.rejected)


def _log_odds(logp: Array) -> Array:
    """log (p / (1 − p)); a probability that rounds to 1 counts as the largest below."""
    below = jnp.minimum(logp, -jnp.finfo(logp.dtype).eps)
    return below - jnp.log(-jnp.expm1(below))


@runtime_checkable
class Scores(Protocol):
    """A module that scores texts; `score`: makes a number of the last hidden state, `embed`."""

    score: Param


def token_scores(x: Array, score: Param) -> Array:
    """A number at each position, `batch seq`, float32 at least, of the last hidden state `x`."""
    scores = einsum("batch seq.residual embed, embed -> batch seq", x, score)
    return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))


@dataclass(frozen=True)
class Reward(Pairwise):
    """−log σ(r_chosen − r_rejected − m) + c·(r_chosen + r_rejected)², r the score of an answer at its last token: the
    Bradley–Terry model (1952), as of Ouyang et al. (arXiv:2203.02155, equation 1).

    Args:
        margin: m, by how much the chosen answer is to be better (Touvron et al., arXiv:2307.09288, section 3.2.2).
        centring: c, which holds scores around 0 (Eisenstein et al., arXiv:2312.09244).

    Metrics as of `Preference`; `chosen` and `rejected` are scores. For models with a `score`, as `RewardModel`.
    """

    margin: float = 0.0
    centring: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[0, inf)", "margin", "centring")

    def check(self, module: Any) -> None:
        if not isinstance(module, Scores) or not isinstance(module, HasDims):
            raise UserError(
                f"Reward needs a model that scores texts; build() returns a {type(module).__name__} without `score`: "
                "set Train.model = @RewardModel(), and RewardModel.model to this one"
            )

    def scores(self, module: Any, batch: Batch, key: Array | None = None) -> tuple[Array, Any]:
        """The score of each answer, `batch example side`, 0 where there is none; and the auxiliary terms."""
        x, auxiliary = self.hidden(module, batch, key)
        scores = token_scores(x, module.score)
        return self.summed(jnp.where(jnp.any(self.last_of_answers(batch), axis=2), scores, 0), batch), auxiliary

    def values(self, module: Any, batch: Batch, key: Array | None = None) -> tuple[tuple[Array, Sides], Auxiliary]:
        scores, auxiliary = self.scores(module, batch, key)
        scored = sides_of(scores)
        together = scored.chosen + scored.rejected
        loss = -jax.nn.log_sigmoid(scored.difference - self.margin) + self.centring * jnp.square(together)
        return (loss, scored), auxiliary
