"""Several engines of one model behind one front: what data parallelism is for requests."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axon.layout import Layout
from axon.runtime import Runtime, nested
from axon.serve.adapters import Adapter
from axon.serve.engine import Engine
from axon.serve.request import Request, Update
from axon.serve.stats import Stats
from axon.serve.weights import as_stored


class Replicas:
    """Engines of the same model and capacity, each on devices of its own, as if they were one; to be called from one
    thread.

    A request goes to the engine with the fewest, where a prompt of which a part is in an engine's pages counts as that
    much of a request less. What it is answered does not depend on which that is.
    """

    def __init__(self, engines: Sequence[Engine]):
        self.engines = tuple(engines)
        self.tokenizer, self.max_length, self.vocab = engines[0].tokenizer, engines[0].max_length, engines[0].vocab
        self._submitted = 0
        self._places: dict[int, tuple[int, int]] = {}
        """Number of a request → that of its engine, and its number there."""
        self._numbers: dict[tuple[int, int], int] = {}

    @property
    def busy(self) -> bool:
        """As `Engine.busy`."""
        return any(engine.busy for engine in self.engines)

    def room(self, prompt: int) -> int:
        """As `Engine.room`."""
        return self.engines[0].room(prompt)

    def submit(self, request: Request) -> int:
        """As `Engine.submit`."""
        number = min(range(len(self.engines)), key=lambda each: self._work(self.engines[each], request))
        place = number, self.engines[number].submit(request)
        self._submitted += 1
        self._places[self._submitted], self._numbers[place] = place, self._submitted
        return self._submitted

    def cancel(self, number: int) -> None:
        """As `Engine.cancel`."""
        if place := self._places.get(number):
            self.engines[place[0]].cancel(place[1])

    def step(self) -> list[Update]:
        """A step of each engine that has anything to do. Each waits for its last one alone, so all devices compute."""
        updates: list[Update] = []
        for place, engine in enumerate(self.engines):
            updates += [self._renumbered(place, update) for update in (engine.step() if engine.busy else ())]
        return updates

    def swap(self, parameters: Any, variables: Any = None) -> None:
        """As `Engine.swap`, for all; the arrays may be anywhere."""
        for engine in self.engines:
            own = copied(engine.runtime, parameters, variables or {})
            engine.swap(own[0], None if variables is None else own[1])

    @property
    def adapters(self) -> tuple[str, ...]:
        """As `Engine.adapters`."""
        return self.engines[0].adapters

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """As `Engine.load_adapter`, for all or for none."""
        for engine in self.engines:
            engine.check_adapter(name, adapter)
        for engine in self.engines:
            engine.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """As `Engine.unload_adapter`, for all."""
        for engine in self.engines:
            engine.unload_adapter(name)

    def warm_up(self) -> None:
        """As `Engine.warm_up`, for all at once: each has programs of its own, for its own devices."""
        with ThreadPoolExecutor(len(self.engines)) as pool:
            list(pool.map(Engine.warm_up, self.engines))

    def stats(self) -> Stats:
        """The sums."""
        found = [engine.stats() for engine in self.engines]
        return Stats(**{field.name: sum(getattr(one, field.name) for one in found) for field in fields(Stats)})

    @staticmethod
    def _work(engine: Engine, request: Request) -> float:
        return engine.requests - engine.known(request) / len(request.prompt)

    def _renumbered(self, engine: int, update: Update) -> Update:
        place = engine, update.request
        number = self._numbers[place]
        if update.finish is not None:
            del self._numbers[place], self._places[number]
        return update._replace(request=number)


def shares(runtime: Runtime) -> list[tuple[Layout, list[Any]]]:
    """The layout and the devices of each engine: the mesh, cut along the axes that split the batch and no weight."""
    placement, mesh, cut = runtime.placement, runtime.placement.mesh, engine_axes(runtime)
    assert isinstance(mesh, Mesh), "engines run on devices"
    layout = replace(placement.layout, mesh={**placement.layout.mesh, **dict.fromkeys(cut, 1)})
    devices = np.moveaxis(mesh.devices, [mesh.axis_names.index(axis) for axis in cut], range(len(cut)))
    return [(layout, list(own)) for own in devices.reshape(math.prod(devices.shape[: len(cut)]), -1)]


def engine_axes(runtime: Runtime) -> list[str]:
    """The mesh axes along which there are several engines: those that split the batch and no weight."""
    placement = runtime.placement
    weights = [placement.sharding(spec.axes, spec.kind).spec for spec in runtime.parameters.values()]
    split = set(jax.tree.leaves([tuple(spec) for spec in weights]))
    return [axis for axis in placement.mesh_axes("batch") if axis not in split]


def copied(runtime: Runtime, parameters: Any, variables: Any) -> tuple[Any, Any]:
    """A runtime's parameters and variables, nested by path, from wherever they are to its devices, as `as_stored`."""
    wanted = runtime.abstract((nested(runtime.parameters), nested(runtime.variables)))
    places = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    parameters = jax.device_put(as_stored(runtime, parameters), places[0])
    return parameters, jax.device_put(variables, places[1]) if variables else variables
