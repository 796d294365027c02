"""The steps of an engine that is only described: traced and compiled with no array of it made."""

import math
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from axon.axes.array_spec import Specs
from axon.runtime import Runtime
from axon.serve.batch import Size
from axon.serve.capacity import Capacity
from axon.serve.runner import check_continues
from axon.serve.step import Step, StepInputs, windows_of
from axon.serve.weights import abstract


class ServingProgram:
    """What an `Engine` of these runs.

    Args:
        runtime: whose module is served, perhaps on devices that are not here. capacity: how much at once.

    Raises `UserError` for a module that is no `LanguageModel`.
    """

    def __init__(self, runtime: Runtime, capacity: Capacity):
        check_continues(runtime.module)
        self.runtime, self.capacity = runtime, capacity
        self.length = capacity.length_of(runtime.module)
        self.step = Step(runtime, windows_of(runtime.module))
        self.page_size = capacity.page_size_on(runtime.placement.platform)
        self.pools = capacity.pools(self.step.windows, self.page_size, self.length)

    @property
    def parameters(self) -> Specs:
        """Path → specification."""
        return self.runtime.parameters

    @cached_property
    def cache(self) -> Any:
        """The specs of the pages."""
        pages = {window: pool.count for window, pool in self.pools.items()}
        return self.step.cache_specs(pages, self.page_size, self.capacity.cache_dtype)

    @property
    def decode(self) -> Size:
        """The step in which every request gets a token: the smallest with room for all."""
        return next(size for size in self.capacity.sizes() if size.tokens >= self.capacity.requests)

    @property
    def prefill(self) -> Size:
        """The largest step."""
        return self.capacity.sizes()[-1]

    def traced(self, size: Size) -> Any:
        """A step of this size, to be lowered by `Runtime.lower`."""
        requests, columns = self.capacity.requests, max(pool.pages_for(self.length) for pool in self.pools.values())
        tokens = self._ints(size.tokens)
        tables = tuple(self._ints(requests, columns) for _ in self.pools)
        places = self._ints(requests), self._ints(requests + 1)
        inputs = StepInputs(tokens, tokens, tokens, *places, tables, self._ints(size.rows))
        variables, cache = self.runtime.abstract(self.runtime.variables), self.step.abstract_cache(self.cache)
        return self.step.traced(abstract(self.runtime), variables, cache, self._ints(requests), inputs)

    def parameter_bytes(self) -> int:
        """Of each device."""
        return sum(map(self.runtime.placement.bytes_per_device, self.runtime.parameters.values()))

    def cache_bytes(self) -> int:
        """Of each device."""
        return sum(map(self.step.placement.bytes_per_device, jax.tree.leaves(self.cache)))

    def read_bytes(self) -> int:
        """What a decode step has to read of each device's memory: all weights, but of a table of embeddings the rows of
        its tokens alone, and `cached_bytes`."""
        module, placement = self.runtime.module, self.runtime.placement
        table = None if module.tied else self.runtime.parameters["embedding/table"]
        unread = 0 if table is None else placement.bytes_per_device(table)
        return self.parameter_bytes() - unread + self.cached_bytes()

    def cached_bytes(self) -> int:
        """Of each device, the pages of all requests at half their length, as far as there are so many."""
        tokens = self.capacity.requests * self.length // 2
        room = max((pool.count - 1) * pool.size for pool in self.pools.values())
        return math.ceil(self.cache_bytes() * min(1, tokens / room))

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        everywhere = NamedSharding(self.runtime.placement.mesh, PartitionSpec(*(None for _ in shape)))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)
