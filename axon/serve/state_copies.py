"""States on the devices: copied to a snapshot where a step ends at a border of a page, and back where one begins."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax

from axon.serve.block_tables import BlockTables
from axon.serve.scheduler import Scheduled
from axon.serve.sequence import Sequence as Running
from axon.serve.step import Step


class StateCopies:
    """The arrays of `snapshots`, and the copies from and to the states of running sequences.

    Args:
        specs: of the snapshots, see `Step.snapshot_specs`; empty of a model without states, of which nothing is copied.
        tables: whose prefixes they are of. slot_of: of a sequence, the place in a cache of its state that has seen no
            drafts.
    """

    def __init__(self, step: Step, specs: Any, tables: BlockTables, slot_of: Callable[[Running], int]):
        self._step, self._tables, self._slot_of = step, tables, slot_of
        self._specs, self._arrays = specs, step.empty_cache(specs)
        self._copy = step.jit(_copied, donate_argnames="target")

    @property
    def compiles(self) -> int:
        """How many programs there are."""
        return self._copy._cache_size()

    def release(self) -> None:
        """Give the arrays back, whose content is lost."""
        self._arrays = {}

    def reserve(self) -> None:
        """Have arrays again."""
        self._arrays = self._step.empty_cache(self._specs)

    def restore(self, cache: Any, parts: Sequence[Scheduled]) -> Any:
        """`cache`, which is donated, with the states that sequences begin with whose first step is launched now."""
        for sequence in (part.sequence for part in parts):
            if sequence.snapshot is not None:
                cache = self._into_cache(cache, self._slot_of(sequence), sequence.snapshot)
                self._tables.drop_snapshot(sequence)
        return cache

    def save(self, cache: Any, parts: Sequence[Scheduled]) -> None:
        """Keep the states of those of the launched step that end at a border, of tokens that the host knows."""
        snapshots = self._tables.snapshots
        if snapshots is None:
            return
        for part in parts:
            end, size = part.start + part.count, self._tables.size
            if end % size or end > len(part.sequence.tokens):
                continue
            place = snapshots.save(part.sequence.hash_pages(size)[end // size - 1])
            if place is not None:
                self._into_snapshots(cache, place, self._slot_of(part.sequence))

    def warm_up(self, cache: Any) -> Any:
        """Compile both copies: those of nothing, each 0 to 0."""
        if not self._arrays:
            return cache
        cache = self._into_cache(cache, 0, 0)
        self._into_snapshots(cache, 0, 0)
        return jax.block_until_ready(cache)

    def _into_cache(self, cache: Any, slot: int, place: int) -> Any:
        states = {kind: {name: cache[kind][name] for name in own} for kind, own in self._arrays.items()}
        with self._step.tracing():
            states = self._copy(states, self._arrays, slot, place)
        return {kind: own | states.get(kind, {}) for kind, own in cache.items()}

    def _into_snapshots(self, cache: Any, place: int, slot: int) -> None:
        states = {kind: {name: cache[kind][name] for name in own} for kind, own in self._arrays.items()}
        with self._step.tracing():
            self._arrays = self._copy(self._arrays, states, place, slot)


def _copied(target: Any, source: Any, to: Array, start: Array) -> Any:
    """`target` with what `source` has at another place, both `_layers batch …`."""

    def one(target: Array, source: Array) -> Array:
        value = lax.dynamic_index_in_dim(source, start, axis=1)
        return lax.dynamic_update_slice_in_dim(target, value, to, axis=1)

    return jax.tree.map(one, target, source)
