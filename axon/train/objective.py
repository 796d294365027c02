"""Objectives: frozen dataclasses that declare a batch in axes, and compute their terms as sums and counts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from axon import axes
from axon.axes import MAX, SUM, ArraySpec
from axon.axes.array_spec import Specs
from axon.checks import check_range
from axon.errors import UserError
from axon.nn import Inputs, LanguageModel, cross_entropy, token_nll
from axon.nn.adapter_set import ADAPTERS
from axon.nn.auxiliary import Auxiliary
from axon.nn.param import VariableSpec

SEQUENCES = "sequences"
"""Key of a batch inside a step: the number of each of its sequences in the global batch, `batch` int32."""

TOKEN = "token"
"""The unit of an objective whose loss is a mean over every real token."""

TEXT = dict.fromkeys(("tokens", "targets", "positions", "documents"), jnp.int32) | {"weights": jnp.float32}
"""The arrays of a batch of text, each `batch seq`, and their dtypes."""

Batch = Mapping[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """Sums of an objective over a part of a batch: those of microbatches and of devices add up.

    Args:
        minimised: name → a sum; what is minimised is the sum of their means over the global batch. Each is divided by
            the count of its name, in nats or whatever the objective's own unit is.
        metrics: name → a sum that is only reported, as a mean; it carries no gradient.
        statistics: path of a module's `Variable` → the statistic that it is updated from.
        maxima: name → the largest of values that are not negative, over the batch, which is only reported.
    """

    minimised: dict[str, Array]
    metrics: dict[str, Array] = field(default_factory=dict)
    statistics: dict[str, Array] = field(default_factory=dict)
    maxima: dict[str, Array] = field(default_factory=dict)

    def with_auxiliary(self, auxiliary: Auxiliary) -> "Sums":
        """The sums, with auxiliary losses minimised and reported, and their statistics; metrics have no gradient."""
        metrics = jax.lax.stop_gradient(self.metrics | auxiliary.losses)
        return replace(
            self, minimised=self.minimised | auxiliary.losses, metrics=metrics, statistics=auxiliary.statistics
        )


def reduced(variables: Mapping[str, VariableSpec], how: Callable[..., Array], *parts: Sums) -> Sums:
    """`how(reduction, …)` of each value of some sums: the reduction is SUM, of a maximum MAX, and of a statistic that
    of its variable."""
    statistics = {
        path: how(variables[path].reduction, *(part.statistics[path] for part in parts)) for path in parts[0].statistics
    }
    maxima = jax.tree.map(partial(how, MAX), *(part.maxima for part in parts))
    others = jax.tree.map(partial(how, SUM), *(replace(part, statistics={}, maxima={}) for part in parts))
    return replace(others, statistics=statistics, maxima=maxima)


def paired(variables: Mapping[str, VariableSpec], one: Sums, other: Sums) -> Sums:
    """The sums of two parts of a batch as those of both."""
    return reduced(variables, lambda by, x, y: by.pair(x, y), one, other)


class Objective(ABC):
    """The loss that a step minimises: the base of frozen dataclasses as `NextToken`. By default it is of text.

    Sums and counts are added up over microbatches and devices before one is divided by the other, so that the mean is
    that over the *global* batch, whatever the layout, the number of microbatches and the padding.
    """

    unit: ClassVar[str] = TOKEN
    """What `loss` is a mean over, for messages and plots: a word in the singular, as "image"."""

    references: ClassVar[frozenset[str]] = frozenset()
    """Names of the frozen models that it needs, of `Train.references`: `sums` is given each as a keyword, and in the
    batch what `reference_values` says by it."""

    derived: ClassVar[frozenset[str]] = frozenset()
    """Arrays of its batch that a feed has it make of the others, before the step."""

    @property
    def asks_before(self) -> bool:
        """Whether a feed asks it for what models say of a batch before the step, by default for `derived` arrays."""
        return bool(self.derived)

    def specs(self, batch: int, seq: int) -> Specs:
        """The arrays of a global batch of `batch` sequences of `seq` positions; the first axis of each is `batch`.

        By default `tokens`, `targets`, `positions` in the document, `documents` of the sequence, and `weights`, 0 for
        padding; each `batch seq`."""
        return {name: ArraySpec(("batch", "seq"), (batch, seq), dtype) for name, dtype in TEXT.items()}

    def check(self, module: Any) -> None:
        """Raise `UserError` for an unsupported module."""
        return

    def check_references(self, module: Any, references: Mapping[str, Any]) -> None:
        """Raise `UserError` for frozen models, by name, that cannot go with the module."""
        return

    def reserved_ids(self, seq: int) -> int:
        """How many ids at the end of the vocabulary no token of a text may be."""
        return 0

    def check_vocab(self, vocab: int, seq: int) -> None:
        """Raise `UserError` for ids of the objective's own that a vocabulary of this size lacks."""
        return

    def draw(self, module: Any, batch: Batch, key: Array) -> Batch:
        """Of a global batch and its `SEQUENCES`, the batch that `counts` and `sums` are given parts of, each array's
        first axis `batch`. `key` follows from the run's seed and the step; in evaluation it is always the same."""
        return batch

    def reference_values(self, name: str, module: Any, batch: Batch) -> Array | None:
        """What the frozen model `name` says of a part of a batch: an array with a first axis `batch`, which `sums`
        finds in the batch under that name; None for nothing. It calls the model once.

        On the stages of a pipeline, where `sums` cannot call a frozen model's blocks, all microbatches' are computed
        before the pass of the trained model.
        """
        return None

    def with_references(self, batch: Batch, references: Mapping[str, Any]) -> Batch:
        """A part of a batch, with what the frozen models say of it."""
        said = {name: self.reference_values(name, module, batch) for name, module in references.items()}
        known = {name: value for name, value in said.items() if value is not None}
        return {**batch, **jax.lax.stop_gradient(known)}

    def counts(self, batch: Batch) -> dict[str, Array]:
        """By name of a sum, the count that divides it, of a part of a batch; a function of the data alone.

        "tokens" is the count that a run reports, and the default for names that are missing.
        """
        return {"tokens": jnp.sum(batch["weights"])}

    @abstractmethod
    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        """The sums of a part of a batch. With a `key` the module is in training: dropout is drawn from it and
        `batch["sequences"]`."""
        ...


@dataclass(frozen=True)
class BySequence(Objective):
    """The base of objectives whose sums are over tokens or texts one by one, so that those of some sequences are those
    of the batch with weights of 0 in all others.

    They minimise one sum, which the count of `loss` divides, and the model's auxiliary ones. A class with `sums` of its
    own, as to need less memory, says the same by `values` and `total`. One that changes these and would inherit such
    `sums`, which do not know of it, is refused by a `UserError` where it is defined.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        sums = _definer(cls, "sums")
        for name in ("values", "total"):
            definer = _definer(cls, name)
            if sums is not BySequence and not issubclass(sums, definer):
                raise UserError(
                    f"{cls.__module__}.{cls.__name__} has `{name}` of {definer.__name__}, and `sums` of "
                    f"{sums.__name__}, which do not use it: add `sums = BySequence.sums` to the class (from "
                    "axon.train.objective), or write its own"
                )

    def sums_are_totals(self) -> bool:
        """Whether `sums` are `total` of `values`, for all that the class says."""
        sums = _definer(type(self), "sums")
        parts = {_definer(type(self), name) for name in ("values", "total")}
        return type(self).sums is BySequence.sums or parts == {sums}

    @abstractmethod
    def values(self, module: Any, batch: Batch, key: Array | None = None, **references: Any) -> tuple[Any, Auxiliary]:
        """Arrays with a first axis `batch`, of which the sums are made; and the auxiliary terms. Arguments as of
        `sums`."""

    @abstractmethod
    def total(self, values: Any, batch: Batch) -> Sums:
        """The sums, without auxiliary terms, of what has a weight in the batch."""

    def sums(self, module: Any, batch: Batch, key: Array | None = None, **references: Any) -> Sums:
        values, auxiliary = self.values(module, batch, key, **references)
        return self.total(values, batch).with_auxiliary(auxiliary)


def _definer(cls: type, name: str) -> type:
    """The class from which a class has a method."""
    return next(one for one in cls.__mro__ if name in vars(one))


def sequences_of(batch: Batch, key: Array | None) -> Array | None:
    """The numbers of a batch's sequences in the global batch, int32 `batch`, from which dropout is drawn in training;
    None without a `key`. Raises `UserError` for a batch that lacks them."""
    if key is not None and SEQUENCES not in batch:
        raise UserError(
            f"with a key, which is for training, the batch needs {SEQUENCES!r}: the number of each sequence in it, as "
            f"{{**batch, {SEQUENCES!r}: jnp.arange(len(batch['weights']))}}"
        )
    return None if key is None else batch[SEQUENCES]


@dataclass(frozen=True)
class NextToken(BySequence):
    """The next token's negative log-likelihood, in nats, over the real tokens of the batch.

    Args:
        z_loss: weight of the squared log-partition, log² Σ exp(logits) (Chowdhery et al., arXiv:2204.02311, section 5).
    """

    z_loss: float = 0.0

    def __post_init__(self):
        check_range(self, "[0, inf)", "z_loss")

    def check(self, module: Any) -> None:
        _check_language_model(module, "NextToken")
        if module.has_mtp:
            raise UserError(
                "NextToken would leave the block that predicts the token after the next untrained (parameters "
                "mtp/…): set Train.objective = @MultiToken(), or build the model without it, multi_token = False"
            )

    def inputs(self, batch: Batch, key: Array | None = None, documents: str = "documents") -> Inputs:
        """A language model's inputs, of a batch; in training, with a `key`. `documents`: the array that has these."""
        text = batch["tokens"], batch["positions"], batch[documents]
        return Inputs(*text, key=key, sequences=sequences_of(batch, key), adapters=batch.get(ADAPTERS))

    def values(self, module: Any, batch: Batch, key: Array | None = None) -> tuple[tuple[Array, Array], Auxiliary]:
        """The loss of each token, and its log-partition, both `batch seq`."""
        x, _, auxiliary = module.hidden(self.inputs(batch, key))
        return token_nll(x, module.output, batch["targets"]), auxiliary

    def total(self, values: tuple[Array, Array], batch: Batch) -> Sums:
        nll, lse = values
        loss = jnp.sum(batch["weights"] * (nll + self.z_loss * lse**2))
        return Sums({"next_token": loss}, {"loss": jnp.sum(batch["weights"] * nll)})

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        """The sums of `BySequence`, in blocks of tokens, so that no array has the values of all tokens."""
        x, _, auxiliary = module.hidden(self.inputs(batch, key))
        loss, nll = cross_entropy(x, module.output, batch["targets"], batch["weights"], self.z_loss)
        return Sums({"next_token": loss}, {"loss": nll}).with_auxiliary(auxiliary)


@dataclass(frozen=True)
class MultiToken(Objective):
    """The next token's negative log-likelihood, and with it that of the token after it (DeepSeek-V3's multi-token
    prediction, arXiv:2412.19437, section 2.2, at depth 1), for models with `LanguageModel.mtp`.

    Args:
        weight: of the second term. (DeepSeek-V3: 0.3, later 0.1.) z_loss: as of `NextToken`, in both.

    The second term is a mean over the positions whose next position is a real one of the same document. A metric of its
    own, `mtp_loss`, reports it without its weight; `loss` is the next token's.
    """

    weight: float = 0.3
    z_loss: float = 0.0

    def __post_init__(self):
        check_range(self, "[0, inf)", "weight", "z_loss")

    def check(self, module: Any) -> None:
        _check_language_model(module, "MultiToken")
        if not module.has_mtp:
            raise UserError(
                "MultiToken needs a model that predicts the token after the next, as DeepSeek and Qwen3Next "
                "with multi_token = True; build() returns one that does not. Use NextToken, or set that"
            )

    def counts(self, batch: Batch) -> dict[str, Array]:
        return super().counts(batch) | {"mtp_loss": jnp.sum(_second_targets(batch)[1])}

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        inputs = NextToken().inputs(batch, key)
        x, _, auxiliary = module.hidden(inputs)
        loss, nll = cross_entropy(x, module.output, batch["targets"], batch["weights"], self.z_loss)
        x, _, own = module.mtp_hidden(x, inputs, batch["targets"])
        second_loss, second_nll = cross_entropy(x, module.output, *_second_targets(batch), self.z_loss)
        minimised = {"next_token": loss, "mtp_loss": self.weight * second_loss}
        return Sums(minimised, {"loss": nll, "mtp_loss": second_nll}).with_auxiliary(auxiliary + own)


def _check_language_model(module: Any, objective: str) -> None:
    if not isinstance(module, LanguageModel):
        raise UserError(
            f"{objective} needs an axon.nn.LanguageModel, or a subclass of it, with a block of your own; "
            f"build() returns a {type(module).__name__}"
        )
    if not module.predicts_tokens:
        raise UserError(
            f"{objective} predicts tokens, and the model has {' and '.join(module.on_top)} in the place of its head: "
            "set Train.objective to one for that, as @TextClassification() or @Reward()"
        )


def _second_targets(batch: Batch) -> tuple[Array, Array]:
    """The token two places on, and its weight: 0 where the next position is of another document, or is none."""
    same = batch["documents"] == _at_next_position(batch["documents"], -1)
    weights = batch["weights"] * _at_next_position(batch["weights"], 0)
    return _at_next_position(batch["targets"], 0), jnp.where(same, weights, 0)


def _at_next_position(x: Array, last: int) -> Array:
    """`x[batch seq]` one place on, and `last` at the last position."""

    def shifted(x: Array) -> Array:
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=last)

    return axes.shard(axes.over_positions(shifted, x), "batch seq")


def means(sums: Mapping[str, Array], counts: Mapping[str, Array]) -> dict[str, Array]:
    """Each sum divided by its count; 0 where nothing was counted."""

    def mean(name: str) -> Array:
        count = counts.get(name, counts["tokens"])
        return sums[name] / jnp.where(count > 0, count, 1)

    return {name: mean(name) for name in sums}
