"""Losses that couple the examples of a global batch, exact in microbatches by cached gradients."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from axon.checks import check_range
from axon.composition import LATE, ONE_BIT, REPLICAS, Part
from axon.nn.auxiliary import Auxiliary
from axon.train.objective import Batch, Objective, Sums, means
from axon.train.preference import AnswerObjective, check_language_models

LINEAR = "linear"
"""Name of the sum that `Linearised` minimises; its count is 1."""

COTANGENT = "cotangent of "
"""The prefix of a feature's name in the arrays of a batch that `Linearised` is given."""

Features = Mapping[str, Array]


class WholeBatch(Objective):
    """The base of objectives whose loss is a function of every example of the global batch at once.

    `features` are of each sequence by itself, `coupled` makes sums of those of all sequences. In microbatches, and on
    the stages of a pipeline, the features of the whole batch are computed first, then the loss with its gradient by
    them, and then in each microbatch the gradient of its features times that one (Gao et al., arXiv:2101.06983): the
    gradient of the global batch's loss, at the cost of a second forward pass.
    """

    @abstractmethod
    def features(
        self, module: Any, batch: Batch, key: Array | None = None, **references: Any
    ) -> tuple[Features, Auxiliary]:
        """By name what the loss needs of a part of a batch, the first axis of each `batch`; and the auxiliary terms.
        `key` and `references` as of `sums`. It calls the model once."""

    @abstractmethod
    def coupled(self, features: Features, batch: Batch) -> Sums:
        """The sums of a global batch with these features, without auxiliary terms."""

    def sums(self, module: Any, batch: Batch, key: Array | None = None, **references: Any) -> Sums:
        features, auxiliary = self.features(module, batch, key, **references)
        return self.coupled(features, batch).with_auxiliary(auxiliary)

    @property
    def composition(self) -> tuple[Part, ...]:
        """See `axon.composition`."""
        why = "its loss needs all examples of the global batch at once"
        remedy = "use an objective whose loss is a sum over examples"
        excludes = {LATE: why, REPLICAS: why, ONE_BIT: why}
        return (Part(f"Train.objective = {type(self).__name__}", remedy, excludes=excludes),)


@dataclass(frozen=True)
class CoupledExamples(AnswerObjective, WholeBatch):
    """The base of losses over the global batch whose examples have up to three texts, which are in one sequence.

    Args:
        examples: room for so many examples in a sequence.
    """

    unit: ClassVar[str] = "example"
    sides: ClassVar[int] = 3

    examples: int = 8

    def __post_init__(self):
        check_range(self, "[1, 2**16)", "examples")

    @property
    def room(self) -> int:
        return self.examples

    def check(self, module: Any) -> None:
        check_language_models(module)


@dataclass(frozen=True)
class Linearised(Objective):
    """Features of `objective` times the gradients of its loss by them, which are in the batch as `COTANGENT` + name."""

    objective: WholeBatch

    def reference_values(self, name: str, module: Any, batch: Batch) -> Array | None:
        return self.objective.reference_values(name, module, batch)

    def sums(self, module: Any, batch: Batch, key: Array | None = None, **references: Any) -> Sums:
        features, auxiliary = self.objective.features(module, batch, key, **references)
        products = (jnp.sum(batch[COTANGENT + name] * feature) for name, feature in features.items())
        return Sums({LINEAR: sum(products, jnp.zeros(()))}).with_auxiliary(auxiliary)


def by_cached_gradients(
    objective: WholeBatch,
    features: Features,
    batch: Batch,
    counts: Mapping[str, Array],
    gradients: Callable[[Linearised, Batch, Mapping[str, Array]], tuple[Any, Sums]],
) -> tuple[Any, Sums]:
    """Gradients and sums of a global batch that has these features; `gradients(objective, batch, counts)`: those of a
    loss that is a sum over examples."""

    def mean(features: Features) -> tuple[Array, Sums]:
        sums = objective.coupled(features, batch)
        return sum(means(sums.minimised, counts).values(), jnp.zeros(())), sums

    cotangents, whole = jax.grad(mean, has_aux=True)(features)
    with_cotangents = {**batch, **{COTANGENT + name: cotangent for name, cotangent in cotangents.items()}}
    found, sums = gradients(Linearised(objective), with_cotangents, {**counts, LINEAR: jnp.ones(())})
    auxiliary = {name: value for name, value in sums.minimised.items() if name != LINEAR}
    return found, whole.with_auxiliary(Auxiliary(auxiliary, sums.statistics))
