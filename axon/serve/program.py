"""The steps of an engine that is only described: traced and compiled with no array of it made."""

import math
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from axon.axes import ArraySpec
from axon.axes.array_spec import Specs
from axon.nn import CacheSpec
from axon.nn.cache import of_cache_kind
from axon.runtime import Runtime
from axon.serve.batch import Size
from axon.serve.capacity import Capacity
from axon.serve.encoder_step import EncoderStep
from axon.serve.multi_token import MultiToken
from axon.serve.multi_token_step import MultiTokenStep
from axon.serve.step import Step, StepInputs, windows_by_kind
from axon.serve.text_model import check_writes
from axon.serve.weights import abstract, adapter_rank


class ServingProgram:
    """The programs that an `Engine` runs.

    Args:
        runtime: whose module is served, perhaps on devices that are not here. capacity: how much at once.
        multi_token: whether the model's own multi-token block guesses, see `axon.serve.multi_token.MultiToken`.

    Raises `UserError` for a module that writes no text, and for one without the block that is to guess.
    """

    def __init__(self, runtime: Runtime, capacity: Capacity, multi_token: bool = False):
        check_writes(runtime.module)
        self.runtime, self.capacity = runtime, capacity
        self.length = capacity.length_of(runtime.module)
        self.step = Step(runtime, self.length)
        self.block, self.encoder = MultiTokenStep(self.step) if multi_token else None, EncoderStep(self.step)
        self.page_size = capacity.page_size_on(runtime.placement.platform)
        self.pools = capacity.pools(self.step.windows, self.page_size, self.length)

    @property
    def parameters(self) -> Specs:
        """Path → specification."""
        return self.runtime.parameters

    @cached_property
    def cache(self) -> Any:
        """The specs of pages and states."""
        versions = 1 + (MultiToken.most if self.block else 0)
        return self.step.cache_specs(self.pools, self.capacity.requests, versions, self.capacity.cache_dtype)

    @cached_property
    def block_cache(self) -> dict[str, CacheSpec]:
        """Of the multi-token block's own pages; empty where it does not guess."""
        return self.block.cache_specs(self.pools, self.capacity.cache_dtype) if self.block else {}

    @property
    def cached_arrays(self) -> list[CacheSpec]:
        """All that an engine keeps of sequences: pages and states, those of the multi-token block, and snapshots."""
        return jax.tree.leaves((self.cache, self.block_cache, self.snapshots))

    @cached_property
    def snapshots(self) -> Any:
        """The specs of the snapshots of states."""
        return self.step.snapshot_specs(self.capacity.num_snapshots)

    @property
    def caches(self) -> list[tuple[dict[str, CacheSpec], int | None]]:
        """Of each kind of block, the multi-token one among them, the specs of its pages and the keys that it sees."""
        windows = windows_by_kind(self.runtime.module)
        own = [(of_cache_kind(self.cache[kind], "pages"), window) for kind, window in windows.items()]
        return own if self.block is None else [*own, (self.block_cache, self.block.window)]

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
        cache, last = self.step.abstract_cache(self.cache), self._replicated(self.capacity.requests)
        model = self.block or self.step
        return model.traced(abstract(self.runtime), self._variables, cache, last, self._inputs(size))

    def traced_guess(self, size: Size) -> list[Any]:
        """What follows a step of this size where the multi-token block guesses: the block, and the logits of its
        guesses."""
        if self.block is None:
            return []
        parameters, variables, width = abstract(self.runtime), self._variables, self.runtime.module.dims["embed"]
        dtype, tokens = self.runtime.compute_dtype, self._replicated(size.tokens)
        hidden = self.runtime.abstract(
            ArraySpec(("batch", "seq", "embed"), (1, size.tokens, width), dtype), self.step.placement
        )
        rows, ids = self._replicated(size.rows, width, dtype=dtype), self._replicated(size.rows)
        cache, inputs = self.step.abstract_cache(self.block_cache), self._inputs(size)
        with self.step.tracing():
            return [
                self.block.mtp.trace(
                    parameters, variables, cache=cache, hidden=hidden, after=tokens, ids=ids, inputs=inputs
                ),
                self.block.guess.trace(parameters, variables, rows, ids),
            ]

    def traced_encoder(self) -> list[Any]:
        """Of an encoder–decoder the encoder with the longest text."""
        if not self.encoder.lengths:
            return []
        cache, tokens = self.step.abstract_cache(self.cache), self._replicated(1, self.encoder.lengths[-1])
        return [self.encoder.traced(abstract(self.runtime), self._variables, cache, tokens, self._replicated())]

    def flops(self, size: Size) -> list[int]:
        """Model FLOPs of a step of this size, and of each program of `traced_guess`."""
        parts = self.runtime.module.flops_by_part(self.length)  # whose queries see half of that on average
        step = size.tokens * (parts["layers"] + parts["head"])
        return [step] if self.block is None else [step, size.tokens * parts["mtp"], size.rows * parts["head"]]

    @property
    def encoder_flops(self) -> list[int]:
        """Model FLOPs of each program of `traced_encoder`."""
        return [length * self.runtime.module.flops_by_part(length)["encoder"] for length in self.encoder.lengths[-1:]]

    def parameter_bytes(self) -> int:
        """Of each device."""
        return sum(map(self.runtime.placement.bytes_per_device, self.runtime.parameters.values()))

    def cache_bytes(self) -> int:
        """Of each device, the multi-token block's pages and the snapshots of states among them."""
        return sum(map(self.step.placement.bytes_per_device, self.cached_arrays))

    def snapshot_bytes(self) -> int:
        """Of each device."""
        return sum(map(self.step.placement.bytes_per_device, jax.tree.leaves(self.snapshots)))

    def read_bytes(self) -> int:
        """What a decode step has to read of each device's memory: the weights, but of a table of embeddings the rows of
        its tokens alone; of a multi-token block that guesses also the head's once more, of one that does not, none; of
        an encoder none; and `cached_bytes`."""
        size, tied = self.runtime.placement.bytes_per_device, self.runtime.module.tied
        table, head, mtp, encoder = (
            sum(size(spec) for path, spec in self.runtime.parameters.items() if f"{path}/".startswith(f"{part}/"))
            for part in ("embedding/table", "embedding/table" if tied else "head", "mtp", "encoder")
        )
        read = self.parameter_bytes() + self.cached_bytes() - encoder - (0 if tied else table)
        return read - mtp if self.block is None else read + head

    def cached_bytes(self) -> int:
        """Of each device, the states, and the pages of all requests at half their length, as far as there are so
        many."""
        tokens, states = self.capacity.requests * self.length // 2, self.state_bytes()
        pages = self.cache_bytes() - states - self.snapshot_bytes()
        room = max((pool.count - 1) * pool.size for pool in self.pools.values())
        return states + math.ceil(pages * min(1, tokens / room))

    def state_bytes(self) -> int:
        """Of each device, the states of all running sequences."""
        states = (of_cache_kind(specs, "state") for specs in self.cache.values())
        return sum(self.step.placement.bytes_per_device(spec) for own in states for spec in own.values())

    @property
    def _variables(self) -> Any:
        return self.runtime.abstract(self.runtime.variables)

    def _inputs(self, size: Size) -> StepInputs:
        requests, columns = self.capacity.requests, max(pool.pages_for(self.length) for pool in self.pools.values())
        tokens = self._replicated(size.tokens)
        tables = tuple(self._replicated(requests, columns) for _ in self.pools)
        places = self._replicated(requests), self._replicated(requests + 1)
        drafts = versions = self._replicated(requests)
        rank = adapter_rank(self.runtime)
        own_ranks = (tokens, self._replicated(rank)) if rank else ()
        rows = self._replicated(size.rows)
        return StepInputs(tokens, tokens, tokens, *places, tables, rows, drafts, versions, *own_ranks)

    def _replicated(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """An array that each device has."""
        everywhere = NamedSharding(self.runtime.placement.mesh, PartitionSpec(*(None for _ in shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
