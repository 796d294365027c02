"""Distillation: a model learns a teacher's distributions, of a frozen model beside it or of a file."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax import Array

from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.errors import UserError
from axon.kernels.cross_entropy import Divergence
from axon.nn import token_divergence, token_nll, top_divergence
from axon.nn.auxiliary import Auxiliary
from axon.train.objective import Batch, BySequence, NextToken, Sums

BETA = {"forward": 0.0, "reverse": 1.0, "jensen_shannon": 0.5}
"""`Distillation.divergence` → `axon.kernels.cross_entropy.Divergence.beta`, unless that is set."""

TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Arrays of a batch, `batch seq top`: a teacher's most likely ids for each target, and their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Taught(BySequence):
    """The base of objectives that learn a teacher's distributions of the next token.

    With p the teacher's distribution and q the model's, of each token of the text, the divergence D is

    - "forward": KL(p‖q) (Hinton et al., arXiv:1503.02531),
    - "reverse": KL(q‖p) (Gu et al., arXiv:2306.08543, who take it over the model's own samples),
    - "jensen_shannon": β·KL(p‖m) + (1 − β)·KL(q‖m), m = β·p + (1 − β)·q (Agarwal et al., arXiv:2306.13649, equation 1).
      With β → 0 it is β·KL(p‖q), with β → 1 (1 − β)·KL(q‖p): its gradient vanishes there, as theirs does.

    Args:
        divergence: which D. beta: β, in (0, 1), 0.5 where it is None; for "jensen_shannon" alone.
        next_token: weight of the next token's negative log-likelihood beside it.

    A metric of its own, `divergence`, reports D; `loss` is the next token's.
    """

    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    beta: float | None = None
    next_token: float = 0.0

    def __post_init__(self):
        name = type(self).__name__
        check_range(self, "[0, inf)", "next_token")
        if self.divergence not in BETA:
            raise UserError(f"{name}.divergence is {self.divergence!r}; must be one of {', '.join(map(repr, BETA))}")
        if self.beta is not None and self.divergence != "jensen_shannon":
            raise UserError(
                f"{name}.beta is {self.beta}, and {name}.divergence {self.divergence!r}, which has none: leave it out, "
                "or set divergence to 'jensen_shannon'"
            )
        if self.beta is not None:
            check_range(self, "(0, 1)", "beta")

    def check(self, module: Any) -> None:
        NextToken().check(module)

    def kind(self, temperature: float = 1.0) -> Divergence:
        """The divergence of logits / `temperature`."""
        return Divergence(temperature, BETA[self.divergence] if self.beta is None else self.beta)

    @property
    def factor(self) -> float:
        """By which the divergence is multiplied in what is minimised."""
        return 1.0

    def total(self, values: tuple[Array, Array], batch: Batch) -> Sums:
        """The sums of a divergence of each token, and of its negative log-likelihood, both `batch seq`."""
        divergence, nll = (jnp.sum(batch["weights"] * one) for one in values)
        minimised = self.factor * divergence
        if self.next_token:  # else its backward would run, for a gradient of 0
            minimised += self.next_token * nll
        return Sums({"divergence": minimised}, {"loss": nll, "divergence": divergence})


@dataclass(frozen=True)
class Distillation(Taught):
    """T²·D of the next token's distributions, a teacher's and the model's, both of logits / T, in nats: see `Taught`.

    The teacher is `Train.references["teacher"]`, of the same vocabulary.

    Args:
        temperature: T.
    """

    references: ClassVar[frozenset[str]] = frozenset({"teacher"})

    temperature: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "(0, inf)", "temperature")

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

    @property
    def factor(self) -> float:
        return self.temperature**2

    def reference_values(self, name: str, module: Any, batch: Batch) -> Array:
        """The last layer's output, `batch seq embed`: logits are made of it in blocks, and never exist whole."""
        return module.hidden(NextToken().inputs(batch))[0]

    def values(
        self, module: Any, batch: Batch, key: Array | None = None, teacher: Any = None
    ) -> tuple[tuple[Array, Array], Auxiliary]:
        x, _, auxiliary = module.hidden(NextToken().inputs(batch, key))
        by_token = token_divergence(x, module.output, batch["teacher"], teacher.output, self.kind(self.temperature))
        return (by_token, token_nll(x, module.output, batch["targets"])[0]), auxiliary


@dataclass(frozen=True)
class TopDistillation(Taught):
    """D of the next token's distributions, a teacher's and the model's, in nats: see `Taught`. Of the teacher the
    most likely ids alone are known, from the data, as `TaughtChats`; all others are one outcome of both distributions
    (`axon.kernels.cross_entropy.TopTeacher`), at temperature 1.

    Args:
        top: ids of each token that are known.
    """

    top: int = 32

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[1, 2**16]", "top")

    def specs(self, batch: int, seq: int) -> Specs:
        shape = batch, seq, self.top
        dtypes = {TEACHER_IDS: jnp.int32, TEACHER_LOGPROBS: jnp.float32}
        known = {name: ArraySpec(("batch", "seq", "top"), shape, dtype) for name, dtype in dtypes.items()}
        return {**super().specs(batch, seq), **known}

    def values(self, module: Any, batch: Batch, key: Array | None = None) -> tuple[tuple[Array, Array], Auxiliary]:
        x, _, auxiliary = module.hidden(NextToken().inputs(batch, key))
        by_token = top_divergence(x, module.output, batch[TEACHER_IDS], batch[TEACHER_LOGPROBS], self.kind())
        return (by_token, token_nll(x, module.output, batch["targets"])[0]), auxiliary
