"""An engine that answers with the weights of a run as they are."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax

from axon.axes.memory import to_device
from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.layout import Layout, Placement
from axon.runtime import Runtime, nested
from axon.serve.capacity import Capacity
from axon.serve.check_layout import check_serves
from axon.serve.engine import Engine
from axon.serve.offline import Answer, answers
from axon.serve.replicas import Replicas, shares
from axon.serve.request import Request
from axon.train.state import State

Values = tuple[Any, Any]
"""Parameters and variables, nested by path."""


class PolicyEngine:
    """Answers of the model that a state has, on the devices of the run.

    As in serving, there are several engines where the mesh has axes that split the batch and no weight, within one
    process; and one that computes the same on all of their devices in a run of several.

    Args:
        trained: the run's runtime. layout: where each axis lives while it answers. None: as it is trained, so that the
            engines read the same arrays; otherwise, and where these are in the host's memory, they are moved there by
            one program.
        tokenizer, capacity: see `Engine`.
    """

    def __init__(self, trained: Runtime, layout: Layout | None, tokenizer: Tokenizer, capacity: Capacity):
        own = layout is not None or trained.placement.host
        self.runtime = _like(trained, layout or trained.layout) if own else trained
        self._trained, self.tokenizer = trained, tokenizer
        self._shared = {"tokenizer": tokenizer, "capacity": capacity}
        self._engines: list[Engine] = []
        self._copies: list[jax.Array] = []

    def answers(self, state: State, requests: Sequence[Request]) -> list[Answer]:
        """The answer to each request by the state's weights, in their order. Raises `UserError` where they give no
        numbers, and as `Engine.submit`."""
        return [checked(answer, state) for answer in answers(self.engine(state), requests)]

    def engine(self, state: State) -> Engine | Replicas:
        """What answers by the state's weights, until it is called with another state."""
        weights = self.weights(state)
        if not self._engines:
            pairs = zip(self.runtimes, weights, strict=True)
            self._engines = [Engine(runtime, *values, **self._shared) for runtime, values in pairs]
        else:
            for engine, values in zip(self._engines, weights, strict=True):
                engine.swap(*values)
        return self._engines[0] if len(self._engines) == 1 else Replicas(self._engines)

    def release(self) -> None:
        """Give the memory of keys and values back, and that of weights that were moved, until it is called again."""
        for engine in self._engines:
            engine.release()
        while self._copies:
            self._copies.pop().delete()

    def weights(self, state: State) -> list[Values]:
        """The state's parameters and variables, where each engine reads them."""
        values = state.parameters, state.variables
        if self.runtime is not self._trained:
            values = self._moved(values)
            self._copies += jax.tree.leaves(values)
        if len(self.runtimes) == 1:
            return [values]
        return [jax.tree.map(_on_devices, values, _places(runtime)) for runtime in self.runtimes]

    @cached_property
    def runtimes(self) -> list[Runtime]:
        """One for each engine."""
        own = shares(self.runtime) if jax.process_count() == 1 else []
        return [_like(self.runtime, *share) for share in own] if len(own) > 1 else [self.runtime]

    def close(self) -> None:
        """Give the engines' memory back."""
        self._engines = []

    @cached_property
    def _moved(self) -> Any:
        return jax.jit(to_device, out_shardings=_places(self.runtime))


def checked(answer: Answer, state: State) -> Answer:
    """An answer. Raises `UserError` for one that the state's weights cannot give."""
    if answer.error is not None:
        raise UserError(f"the model cannot answer with the weights of step {int(state.step)}: {answer.error}")
    return answer


def check_layout(trained: Runtime, layout: Layout, described: bool) -> None:
    """Raise `UserError` for a layout of `PolicyEngine` by which the run's model cannot answer. described: on devices of
    other processes; a mesh size of -1, which those infer, is taken for 1."""
    layout = layout.with_axes_of(trained.layout)
    try:
        if described:
            fewest = math.prod(size for size in layout.mesh.values() if size != -1)
            placement = Placement.described(layout, fewest, trained.placement.platform)
        else:
            placement = Placement.of(layout, trained.placement.devices)
        check_serves(_on(trained, placement))
    except UserError as error:
        raise UserError(f"Rollouts.layout: {error}") from None


def _like(runtime: Runtime, layout: Layout, devices: Sequence[Any] | None = None) -> Runtime:
    """The same model, split as `layout` says over these devices, by default all of its own."""
    layout, devices = layout.with_axes_of(runtime.layout), devices or runtime.placement.devices
    return _on(runtime, Placement.of(layout, devices))


def _on(runtime: Runtime, placement: Placement) -> Runtime:
    """The runtime of the same model there, carried out as by the run, with all of its arrays on the devices."""
    execution = runtime.execution.on_devices
    shared = {"precision": runtime.precision, "transforms": runtime.transforms, "execution": execution}
    return Runtime(runtime.model, placement.layout, placement=placement, **shared)


def _places(runtime: Runtime) -> Any:
    """The shardings of a runtime's `Values`."""
    specs = nested(runtime.parameters), nested(runtime.variables)
    return jax.tree.map(lambda leaf: leaf.sharding, runtime.abstract(specs))


def _on_devices(x: jax.Array, place: Any) -> jax.Array:
    """Of an array that each of several groups of devices has whole, that of the group `place`: its shards."""
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    return jax.make_array_from_single_device_arrays(x.shape, place, [shards[one] for one in place.mesh.devices.flat])
