"""Weight averaging around any optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from axon.checks import check_range
from axon.errors import UserError
from axon.train.optimizers.base import Averaging, Optimizer, frozen_paths, is_by_layer, update_flops
from axon.train.optimizers.descend import widened
from axon.train.optimizers.groups import Parameters
from axon.train.optimizers.schedule import Schedule


@dataclass(frozen=True)
class EMA:
    """An exponential moving average of the parameters that `optimizer` trains: what is evaluated, sampled and exported
    (Polyak & Juditsky, 1992; Morales-Brotons et al., arXiv:2411.18704).

    Training is that of `optimizer`, bit for bit. The average is over the values after steps 1, 2, …, weighted by
    `decay`^age; the initial values are left out. It is float32 at least.

    Args:
        optimizer: what trains. decay: of a value's weight with each step; about 1 / (1 − decay) steps are averaged.
    """

    optimizer: Optimizer
    decay: float = 0.999

    def __post_init__(self):
        check_range(self, "[0, 1)", "decay")
        if isinstance(self.optimizer, Averaging):
            name = type(self.optimizer).__name__
            raise UserError(f"EMA.optimizer is {name}, which averages by itself; use {name} alone")

    @property
    def schedule(self) -> Schedule:
        return self.optimizer.schedule

    @property
    def clip(self) -> float | None:
        return self.optimizer.clip

    @property
    def by_layer(self) -> bool:
        return is_by_layer(self.optimizer)

    def transform(self, parameters: Parameters) -> optax.GradientTransformation:
        inner = self.optimizer.transform(parameters)
        frozen = self.frozen(parameters)

        def init(params: Any) -> Any:
            trained = {path: value for path, value in params.items() if path not in frozen}
            return {"optimizer": inner.init(params), "average": widened(trained), "count": jnp.zeros((), jnp.int32)}

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            steps: Any
            steps, after = inner.update(updates, state["optimizer"], params)
            count = state["count"] + 1
            part = (1 - self.decay) / (1 - self.decay ** count.astype(jnp.float32))  # 1 at first: no initial value

            def follow(path: str, average: Array) -> Array:
                value = (params[path] + steps[path]).astype(params[path].dtype)
                return average + part * (value - average)

            average = {path: follow(path, old) for path, old in state["average"].items()}
            return steps, {"optimizer": after, "average": average, "count": count}

        return optax.GradientTransformation(init, update)

    def frozen(self, parameters: Parameters) -> frozenset[str]:
        return frozen_paths(self.optimizer, parameters)

    def update_flops(self, parameters: Parameters) -> dict[str, float]:
        return update_flops(self.optimizer, parameters)

    def evaluated(self, state: Any, values: Mapping[str, Array]) -> dict[str, Array]:
        return {path: state["average"].get(path, value).astype(value.dtype) for path, value in values.items()}
