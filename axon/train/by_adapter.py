"""Several adapters trained at once on one base, each as if it were alone.

What couples the sequences of a batch in training, each adapter has of its own: the divisor of the loss, the norm to
which gradients are clipped, and the optimizer's state. Without sequences in a batch it stays as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from axon import axes
from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.errors import UserError
from axon.nn import parameters, token_nll
from axon.nn.adapter_set import ADAPTERS, is_of_adapter
from axon.train.objective import Batch, NextToken, Objective, Sums
from axon.train.optimizers import Optimizer, Parameters, Schedule, frozen_paths
from axon.train.update import clipped

LOSS = "loss/"
"""What the name of an adapter's loss begins with, in metrics."""


@dataclass(frozen=True)
class ByAdapter(NextToken):
    """`NextToken` of each adapter, over the real tokens of its own sequences: what is minimised is their sum, of which
    an adapter's parameters have the gradients of its own loss.

    A batch has `adapters`, int32 `batch`, the number of each sequence's adapter, -1 for none. Metrics: `loss` of all
    tokens, and `loss/NAME` of each adapter, 0 where the batch has none of its tokens.
    """

    adapters: tuple[str, ...] = ()

    @classmethod
    def of(cls, objective: Objective, adapters: tuple[str, ...]) -> "ByAdapter":
        """Raises `UserError` for an objective whose loss is not a sum over tokens alone."""
        if type(objective) is not NextToken:
            raise UserError(
                f"Train.objective is {type(objective).__name__}, and LoRA.adapters are trained at once by NextToken "
                "alone: set it to @NextToken(), or train one adapter, LoRA.adapters = ()"
            )
        return cls(objective.z_loss, adapters)

    def specs(self, batch: int, seq: int) -> Specs:
        return {**super().specs(batch, seq), ADAPTERS: ArraySpec(("batch",), (batch,), jnp.int32)}

    def check(self, module: Any) -> None:
        super().check(module)
        if found := next((path for path, spec in parameters(module).items() if "experts" in spec.axes), None):
            raise UserError(
                f"the model has experts ({found}), whose load is that of all sequences of a batch, and LoRA.adapters "
                "are each to be trained as if alone: train one adapter, LoRA.adapters = ()"
            )

    def counts(self, batch: Batch) -> dict[str, Array]:
        own = self._by_adapter(batch)
        return super().counts(batch) | {name: jnp.sum(weights) for name, weights in own.items()}

    def sums(self, module: Any, batch: Batch, key: Array | None = None) -> Sums:
        with axes.sequence_adapters(batch[ADAPTERS]):
            x, _, auxiliary = module.hidden(self.inputs(batch, key))
        nll, lse = token_nll(x, module.output, batch["targets"])
        own = self._by_adapter(batch)
        minimised = {name: jnp.sum(weights * (nll + self.z_loss * lse**2)) for name, weights in own.items()}
        reported = {name: jnp.sum(weights * nll) for name, weights in own.items()}
        return Sums(minimised, {"loss": jnp.sum(batch["weights"] * nll)} | reported).with_auxiliary(auxiliary)

    def _by_adapter(self, batch: Batch) -> dict[str, Array]:
        """Name of each adapter's loss → the weights of its own tokens, `batch seq`, 0 of others."""
        numbers, weights = batch[ADAPTERS][:, None], batch["weights"]
        return {LOSS + name: jnp.where(numbers == k, weights, 0) for k, name in enumerate(self.adapters)}


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
