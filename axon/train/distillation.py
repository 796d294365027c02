"""Distillation: a model learns the distributions of a frozen teacher beside the text."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array, lax

from axon.checks import check_range
from axon.errors import UserError
from axon.kernels.cross_entropy import Divergence
from axon.nn import cross_entropy, token_divergence
from axon.train.objective import Batch, NextToken, Objective, Sums

BETA = {"forward": 0.0, "reverse": 1.0, "jensen_shannon": 0.5}
"""`Distillation.divergence` → `axon.kernels.cross_entropy.Divergence.beta`, unless that is set."""


@dataclass(frozen=True)
class Distillation(Objective):
    """T²·D of the next token's distributions, a teacher's and the model's, both of logits / T, in nats.

    The teacher is `Train.references["teacher"]`, of the same vocabulary. With p the teacher's distribution and q the
    model's, of each token of the text, D is

    - "forward": KL(p‖q) (Hinton et al., arXiv:1503.02531),
    - "reverse": KL(q‖p) (Gu et al., arXiv:2306.08543, who take it over the model's own samples),
    - "jensen_shannon": β·KL(p‖m) + (1 − β)·KL(q‖m), m = β·p + (1 − β)·q (Agarwal et al., arXiv:2306.13649, equation 1).
      With β → 0 it is β·KL(p‖q), with β → 1 (1 − β)·KL(q‖p): its gradient vanishes there, as theirs does.

    Args:
        temperature: T. divergence: which D. beta: β, in (0, 1), 0.5 where it is None; for "jensen_shannon" alone.
        next_token: weight of the next token's negative log-likelihood beside it.

    A metric of its own, `divergence`, reports D without T²; `loss` is the next token's.
    """

    references: ClassVar[frozenset[str]] = frozenset({"teacher"})

    temperature: float = 1.0
    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    beta: float | None = None
    next_token: float = 0.0

    def __post_init__(self):
        check_range(self, "(0, inf)", "temperature")
        check_range(self, "[0, inf)", "next_token")
        if self.divergence not in BETA:
            raise UserError(
                f"Distillation.divergence is {self.divergence!r}; must be one of {', '.join(map(repr, BETA))}"
            )
        if self.beta is not None and self.divergence != "jensen_shannon":
            raise UserError(
                f"Distillation.beta is {self.beta}, and Distillation.divergence {self.divergence!r}, which has none: "
                "leave it out, or set divergence to 'jensen_shannon'"
            )
        if self.beta is not None:
            check_range(self, "(0, 1)", "beta")

    def check(self, module: Any) -> None:
        NextToken().check(module)

    def check_references(self, module: Any, references: Any) -> None:
        teacher = references["teacher"]
        NextToken().check(teacher)
        own, theirs = (m.vocab or m.dims["vocab"] for m in (module, teacher))
        if (own, module.dims["vocab"]) != (theirs, teacher.dims["vocab"]):
            raise UserError(
                f"Distillation compares distributions over one vocabulary: Train.model has vocab {own}, stored as "
                f"{module.dims['vocab']}, and Train.references['teacher'] {theirs}, stored as {teacher.dims['vocab']}. "
                "Set vocab and vocab_multiple of the two alike"
            )

    def sums(self, module: Any, batch: Batch, key: Array | None = None, teacher: Any = None) -> Sums:
        text, weights = NextToken(), batch["weights"]
        x, _, auxiliary = module.hidden(text.inputs(batch, key))
        of_teacher = lax.stop_gradient(teacher.hidden(text.inputs(batch))[0])
        kind = Divergence(self.temperature, BETA[self.divergence] if self.beta is None else self.beta)
        divergence = jnp.sum(weights * token_divergence(x, module.output, of_teacher, teacher.output, kind))
        loss, nll = cross_entropy(x, module.output, batch["targets"], weights)
        minimised = {"divergence": self.temperature**2 * divergence}
        minimised |= {"next_token": self.next_token * loss} if self.next_token else {}
        return Sums(minimised, {"loss": nll, "divergence": divergence}).with_auxiliary(auxiliary)
