"""What an objective asks of the weights before a step, about answers that were sampled by them."""

from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from axon import axes
from axon.data.feed import Batch
from axon.train.evaluate import Evaluator
from axon.train.policy_gradient import PolicyObjective
from axon.train.references import Values
from axon.train.state import State


class Estimator:
    """`PolicyObjective.estimates` of global batches, computed on the layout of training; all processes have the whole.

    Args:
        evaluator: the objective's, with the frozen models.
    """

    def __init__(self, evaluator: Evaluator):
        self._evaluator = evaluator

    @property
    def seq(self) -> int:
        """Positions of a sequence."""
        return self._evaluator.seq

    def __call__(self, state: State, batch: Batch) -> Batch:
        """Name → `batch seq`, of a batch of all sequences, by the state's weights."""
        evaluator = self._evaluator
        own = evaluator.place({name: value[evaluator.host_sequences] for name, value in batch.items()})
        with evaluator.runtime.tracing():
            found = self._compiled(state.parameters, state.variables, own, evaluator.references.given)
        order = np.argsort(evaluator.runtime.placement.stored_positions(evaluator.seq))
        return {name: np.asarray(value)[:, order] for name, value in found.items()}

    @cached_property
    def _compiled(self) -> Any:
        evaluator, objective = self._evaluator, self._evaluator.objective
        assert isinstance(objective, PolicyObjective)

        def estimates(parameters: Any, variables: Any, batch: Any, references: Values) -> dict[str, Array]:
            module = evaluator.runtime.bind(parameters, variables)
            frozen = evaluator.references.bound(references, parameters, variables)
            found = objective.estimates(module, batch, **frozen)
            return jax.tree.map(lambda x: axes.reshard(x, PartitionSpec()), found)

        return evaluator.runtime.jit(estimates)
