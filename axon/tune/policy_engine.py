"""An engine that answers with the weights of a run as they are."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax

from axon.axes import Execution
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.layout import Layout
from axon.runtime import Runtime, nested
from axon.serve.capacity import Capacity
from axon.serve.engine import Engine
from axon.serve.offline import Answer, answers
from axon.serve.replicas import check_serves
from axon.serve.request import Request
from axon.train.state import State


class PolicyEngine:
    """Answers of the model that a state has, on the devices of the run.

    Args:
        trained: the run's runtime. layout: where each axis lives while it answers. None: as it is trained, so that the
            engine reads the same arrays; otherwise they are moved there by one program.
        tokenizer, capacity: see `Engine`.
    """

    def __init__(self, trained: Runtime, layout: Layout | None, tokenizer: Tokenizer, capacity: Capacity):
        """Raises `UserError` for a layout that cannot serve."""
        self.runtime = trained if layout is None else _serving(trained, layout)
        self._is_shared, self._tokenizer, self._capacity = layout is None, tokenizer, capacity
        self._engine: Engine | None = None

    def answers(self, state: State, requests: Sequence[Request]) -> list[Answer]:
        """The answer to each request by the state's weights, in their order. Raises `UserError` where they give no
        numbers, and as `Engine.submit`."""
        found = list(answers(self._with(*self.weights(state)), requests))
        if error := next((answer.error for answer in found if answer.error is not None), None):
            raise UserError(f"the model cannot answer with the weights of step {int(state.step)}: {error}")
        return found

    def weights(self, state: State) -> tuple[Any, Any]:
        """The state's parameters and variables, nested by path, where the engine reads them."""
        values = state.parameters, state.variables
        return values if self._is_shared else self._moved(values)

    def close(self) -> None:
        """Give its memory back."""
        self._engine = None

    def _with(self, parameters: Any, variables: Any) -> Engine:
        if self._engine is None:
            shared = {"tokenizer": self._tokenizer, "capacity": self._capacity}
            self._engine = Engine(self.runtime, parameters, variables, **shared)
        else:
            self._engine.swap(parameters, variables)
        return self._engine

    @cached_property
    def _moved(self) -> Any:
        specs = nested(self.runtime.parameters), nested(self.runtime.variables)
        places = jax.tree.map(lambda leaf: leaf.sharding, self.runtime.abstract(specs))
        return jax.jit(lambda values: values, out_shardings=places)


def _serving(trained: Runtime, layout: Layout) -> Runtime:
    """The run's model on the same devices, split as `layout` says."""
    runtime = Runtime(
        trained.model,
        layout.with_axes_of(trained.layout),
        precision=trained.precision,
        execution=Execution(),
        devices=trained.placement.devices,
        transforms=trained.transforms,
    )
    check_serves(layout, runtime.placement)
    return runtime
