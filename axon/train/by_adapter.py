"""Several adapters trained at once on one base, each as if it were alone.

What couples the sequences of a batch in training, each adapter has of its own: the divisor of the loss, the norm to
which gradients are clipped, and the optimizer's state. Without sequences in a batch it stays as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.errors import UserError
from axon.nn.adapter_set import ADAPTERS, is_of_adapter
from axon.nn.auxiliary import Auxiliary
from axon.nn.router import Router
from axon.train.objective import Batch, BySequence, Objective, Sums, paired
from axon.train.optimizers import Optimizer, Parameters, Schedule, frozen_paths
from axon.train.update import clipped
from axon.train.whole_batch import Features, WholeBatch

LOSS, ACCURACY = "loss/", "accuracy/"
"""Prefixes of the names of an adapter's metrics."""


@dataclass(frozen=True)
class ByAdapter(Objective):
    """`objective` of each adapter, over its own sequences: what is minimised is the sum of their losses, of which an
    adapter's parameters have the gradients of its own.

    A batch has `adapters`, int32 `batch`, the number of each sequence's adapter, -1 for none. Metrics: those of all
    adapters, and `loss/NAME` and `accuracy/NAME` of each, if there is one, 0 where the batch has none of its sequences.
    """

    objective: BySequence | WholeBatch
    adapters: tuple[str, ...]

    @classmethod
    def of(cls, objective: Objective, adapters: tuple[str, ...]) -> "ByAdapter":
        """Raises `UserError` for an objective that says neither the values of each sequence nor their features, or
        whose `sums` are not those of its values."""
        if isinstance(objective, WholeBatch):
            return CoupledByAdapter(objective, adapters)
        if not isinstance(objective, BySequence):
            raise UserError(
                f"Train.objective is {type(objective).__name__}, which has no loss of some sequences of a batch, and "
                "LoRA.adapters are each trained by their own: set it to @NextToken(), @TextClassification() or one "
                "of pairs, as @DPO(), or train one adapter, LoRA.adapters = ()"
            )
        if not objective.sums_are_totals():
            raise UserError(
                f"Train.objective is {type(objective).__name__}, whose `sums` are its own, and not those of its "
                "`values` and `total`, by which LoRA.adapters are trained: leave `sums` to BySequence, or train one "
                "adapter, LoRA.adapters = ()"
            )
        return cls(objective, adapters)

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.unit

    @property
    def references(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.references

    def specs(self, batch: int, seq: int) -> Specs:
        return {**self.objective.specs(batch, seq), ADAPTERS: ArraySpec(("batch",), (batch,), jnp.int32)}

    def check(self, module: Any) -> None:
        self.objective.check(module)
        _check_experts(module)

    def check_references(self, module: Any, references: Mapping[str, Any]) -> None:
        self.objective.check_references(module, references)

    def reference_values(self, name: str, module: Any, batch: Batch) -> Array | None:
        return self.objective.reference_values(name, module, batch)

    def draw(self, module: Any, batch: Batch, key: Array) -> Batch:
        return self.objective.draw(module, batch, key)

    def counts(self, batch: Batch) -> dict[str, Array]:
        found = self.objective.counts(_weighted(batch, batch[ADAPTERS] >= 0))
        for name, part in self._of_each(batch).items():
            own = self.objective.counts(part)
            found |= {LOSS + name: own.get("loss", own["tokens"])}
            found |= {ACCURACY + name: own["accuracy"]} if "accuracy" in own else {}
        return found

    def sums(self, module: Any, batch: Batch, key: Array | None = None, **references: Any) -> Sums:
        assert isinstance(self.objective, BySequence)
        values, auxiliary = self.objective.values(module, batch, key, **references)
        return self.of_adapters(self.objective.total, values, batch).with_auxiliary(auxiliary)

    def of_adapters(self, total: Callable[[Any, Batch], Sums], values: Any, batch: Batch) -> Sums:
        """`total(values, …)` of each adapter's sequences."""
        own = {name: total(values, part) for name, part in self._of_each(batch).items()}
        of_all, minimised = reduce(partial(paired, {}), own.values()), {}
        metrics = dict(of_all.metrics)
        for name, sums in own.items():
            (minimised[LOSS + name],) = sums.minimised.values()
            metrics[LOSS + name] = sums.metrics["loss"]
            metrics |= {ACCURACY + name: sums.metrics["accuracy"]} if "accuracy" in sums.metrics else {}
        return replace(of_all, minimised=minimised, metrics=metrics)

    def _of_each(self, batch: Batch) -> dict[str, Batch]:
        """Name of each adapter → the batch, with weights for its own sequences alone."""
        return {name: _weighted(batch, batch[ADAPTERS] == number) for number, name in enumerate(self.adapters)}


def _weighted(batch: Batch, of: Array) -> Batch:
    """The batch with weights for the sequences `of[batch]` alone."""
    return {**batch, "weights": jnp.where(of[:, None], batch["weights"], 0)}


@dataclass(frozen=True)
class CoupledByAdapter(WholeBatch, ByAdapter):
    """As `ByAdapter`, of a loss that couples examples: an adapter's own sequences are the whole batch of its loss."""

    objective: WholeBatch

    def features(
        self, module: Any, batch: Batch, key: Array | None = None, **references: Any
    ) -> tuple[Features, Auxiliary]:
        return self.objective.features(module, batch, key, **references)

    def coupled(self, features: Features, batch: Batch) -> Sums:
        return self.of_adapters(self.objective.coupled, features, batch)


def _check_experts(module: Any) -> None:
    """Raise `UserError` for experts that adapters would share more of than the weights."""
    for _, one in nnx.iter_modules(module):
        if isinstance(one, Router) and (fields := one.routing.of_all_tokens):
            raise UserError(
                f"Routing.{fields[0]} is set, which is of all tokens of a batch, and "
                f"LoRA.adapters are each to be trained as if alone: set it to 0, or train one adapter, "
                "LoRA.adapters = ()"
            )


@dataclass(frozen=True)
class EachAdapter:
    """An optimizer for each adapter, `optimizer` with a state of its own, after clipping by its own gradients' norm.

    Where these are all 0, as in a batch without its sequences, neither parameters nor state change: it has had no step.
    """

    optimizer: Optimizer
    adapters: tuple[str, ...]

    @property
    def schedule(self) -> Schedule:
        return self.optimizer.schedule

    @property
    def clip(self) -> None:
        """None: of the gradients of all together."""
        return None

    def frozen(self, parameters: Parameters) -> frozenset[str]:
        return frozen_paths(self.optimizer, parameters)

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        inner = self.optimizer.transform(parameters)

        def of(values: Mapping[str, Array], adapter: str) -> dict[str, Array]:
            return {path: value for path, value in values.items() if is_of_adapter(path, adapter)}

        def init(params: Any) -> Any:
            return {adapter: inner.init(of(params, adapter)) for adapter in self.adapters}

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            moved, after = {}, {}
            for adapter in self.adapters:
                gradients, norms = clipped(of(updates, adapter), self.optimizer.clip)
                steps: Any
                steps, new = inner.update(gradients, state[adapter], of(params, adapter))
                steps, after[adapter] = _where(
                    jnp.any(norms != 0), (steps, new), (jax.tree.map(jnp.zeros_like, steps), state[adapter])
                )
                moved |= steps
            return moved, after

        return optax.GradientTransformation(init, update)


def _where(condition: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
