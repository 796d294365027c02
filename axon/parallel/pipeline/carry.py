"""The carry from tick to tick: its shapes, where it lies, and what it is before the first tick."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from axon.axes import as_cotangent, reshard
from axon.axes.memory import to_host
from axon.axes.statistics import empty_report
from axon.parallel.pipeline.delivery import Memory
from axon.parallel.pipeline.parts import Parts
from axon.parallel.pipeline.region import PIPE, Region, spec_of
from axon.parallel.pipeline.residuals import Kept
from axon.parallel.pipeline.rows import Pools
from axon.parallel.pipeline.stage import AtHand, Stage, entry, pullback


class Carry(NamedTuple):
    """The carry from tick to tick: what waits, and all that is added up.

    Attributes:
        trained, reports, statistics: of each segment, with an axis `layers` in front; where batches of two ages are
            computed, each stage has the layers of both in a row. outer, sums: one for each age.
    """

    memory: Memory
    trained: Any
    reports: Any
    statistics: Any
    outer: tuple[Any, ...]
    sums: tuple[Any, ...]


@dataclass(frozen=True)
class Carried:
    """The shapes and specs of a carry.

    Args:
        versions: with what a batch of each age is computed. x, extras, statistics: shapes of a chunk's output, of what
            it gives besides, and of the statistics of all layers, of all ages, where they run.
        kept: as of `Stage`.
    """

    versions: Sequence[Parts]
    stage: Stage
    pools: Pools
    region: Region
    x: Any
    extras: Any
    statistics: Any
    kept: Kept | None = None

    @property
    def _kept(self) -> Sequence[Any]:
        """The types of what a forward leaves for its backward, on its stage."""
        return () if self.kept is None else self.kept.forward.types

    @property
    def _left(self) -> Sequence[Any]:
        """The types of what a backward for the inputs leaves for that for the weights, on its stage."""
        return () if self.kept is None else self.kept.backward.types

    @cached_property
    def value(self) -> Any:
        """Specs of what goes from chunk to chunk."""
        return self.region.spec(self.x), jax.tree.map(lambda _: PartitionSpec(), self.extras)

    @cached_property
    def pool(self) -> Any:
        """Specs of a pool of slots for it: axes for stages and slots come first."""
        return jax.tree.map(lambda spec: PartitionSpec(PIPE, None, *spec), self.value)

    @cached_property
    def memory(self) -> Memory:
        made = jax.tree.map(lambda spec: PartitionSpec(PIPE, *spec), self.value)
        waits = PartitionSpec(PIPE, None, self.region.batch_only_axes or None)
        residuals, left = ([waits for _ in types] for types in (self._kept, self._left))
        return Memory(self.pool, residuals, self.pool, left, made, made)

    @cached_property
    def of_layers(self) -> Any:
        """Specs of what is added up of each layer."""
        return jax.tree.map(lambda _: PartitionSpec(PIPE), self.statistics)

    @cached_property
    def gradients(self) -> Any:
        """Specs of each device's sums of gradients, and of its reports: an axis for the devices comes second."""
        parts = self.versions[0]
        found = [list(parts.trained), [dict.fromkeys(of, 0) for of in parts.reports]]
        return jax.tree.map(lambda _: PartitionSpec(PIPE, self.region.batch_only_axes or None), found)

    def nothing(self) -> tuple[Array, Any]:
        """Zeros in place of what goes from chunk to chunk."""
        x = reshard(jnp.zeros(self.x.shape, self.x.dtype), spec_of(self.x))
        return x, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.extras)

    def zeros(self, with_gradients: bool) -> Carry:
        """The carry before the first tick."""
        ages = len(self.versions)
        made = self._waiting()
        inputs, gradients = self._waiting(self.pools.inputs), self._waiting(self.pools.gradients)
        residuals = [self._slots(self.pools.inputs, kept) for kept in self._kept]
        left = [self._slots(self.pools.gradients, kept) for kept in self._left]
        memory = Memory(inputs, residuals, gradients, left, made, made)
        trained = [
            jax.tree.map(partial(self._of_layers, places=ages * storage.runs), of)
            for storage, of in zip(self.stage.storage, self.versions[0].trained, strict=True)
        ]
        statistics = jax.tree.map(lambda s: reshard(jnp.zeros(s.shape, s.dtype), spec_of(s)), self.statistics)
        outer = tuple(_cotangents(parts.outer) if with_gradients else None for parts in self.versions)
        reports = [
            {path: self._of_devices(ages * storage.runs, shape) for path, shape in of.items()}
            for storage, of in zip(self.stage.storage, self.versions[0].reports, strict=True)
        ]
        return Carry(memory, trained, reports, statistics, outer, tuple(map(self._sums, self.versions)))

    def _waiting(self, *slots: int) -> Any:
        def empty(x: Any, spec: PartitionSpec) -> Array:
            zeros = jnp.zeros((self.stage.table.stages, *slots, *x.shape), x.dtype)
            return reshard(zeros, PartitionSpec(PIPE, *[None] * len(slots), *spec))

        return empty(self.x, spec_of(self.x)), jax.tree.map(lambda s: empty(s, PartitionSpec()), self.extras)

    def _slots(self, number: int, kept: Any) -> Array:
        """Slots for an array of a chunk, with an axis for the devices in third place as of `gradients`."""
        mesh, batch_only_axes = jax.sharding.get_abstract_mesh(), self.region.batch_only_axes
        devices = math.prod(mesh.shape[a] for a in batch_only_axes)
        zeros = jnp.zeros((self.stage.table.stages, number, devices, *kept.shape), kept.dtype)
        slots = reshard(zeros, PartitionSpec(PIPE, None, batch_only_axes or None, *kept.sharding.spec))
        return to_host(slots) if kept.memory_space == jax.memory.Space.Host else slots

    def _of_devices(self, places: int, shape: tuple[int, ...]) -> Array:
        """Empty reports of a stage's layers, with an axis for the devices in second place as of `gradients`."""
        mesh, batch_only_axes = jax.sharding.get_abstract_mesh(), self.region.batch_only_axes
        stack = self.stage.table.stages * places, math.prod(mesh.shape[a] for a in batch_only_axes)
        return empty_report(stack, PartitionSpec(PIPE, batch_only_axes or None), shape, self.region.manual)

    def _of_layers(self, value: Array, places: int) -> Array:
        mesh, batch_only_axes = jax.sharding.get_abstract_mesh(), self.region.batch_only_axes
        shape = self.stage.table.stages * places, math.prod(mesh.shape[a] for a in batch_only_axes), *value.shape[1:]
        layers, *rest = spec_of(value)
        return reshard(jnp.zeros(shape, value.dtype), PartitionSpec(layers, batch_only_axes or None, *rest))

    def _sums(self, parts: Parts) -> Any:
        found = jax.eval_shape(parts.last, parts.outer, *self.nothing(), jnp.int32(0))[1]
        return parts.no_sums(found)


def _cotangents(outer: Any) -> Any:
    return jax.tree.map(lambda v: as_cotangent(jnp.zeros(v.shape, v.dtype), v), outer)


def carried(
    versions: Sequence[Parts], stage: Stage, pools: Pools, batch_only_axes: tuple[str, ...], keeps: bool
) -> Carried:
    """The shapes of a carry, of which only `stage` and what it runs are known.

    Args:
        batch_only_axes: mesh axes over which each device has a sum of gradients of its own, unless chunks give
            extras or statistics, which may be of the whole batch. keeps: whether forwards leave residuals.
    """
    parts = versions[0]
    x = jax.eval_shape(parts.first, parts.outer, jnp.int32(0))
    found: list[Kept] = []

    def at_hand(layers: Any, x: Array, inputs: Any, tick: Any) -> AtHand:
        trained, fixed = [[one.to_stages(of) for one, of in zip(stage.storage, part, strict=True)] for part in layers]
        return stage.at_hand([(trained, fixed)], x, entry(inputs, tick.microbatch), tick)

    def besides(*given: Any) -> Any:
        _, extras, statistics = parts.chunk(*at_hand(*given))
        places = stage.table.chunks.virtual * len(versions)
        return extras, jax.tree.map(lambda s: jnp.concatenate([s] * places), statistics)

    def keep(*given: Any) -> tuple[()]:
        one = at_hand(*given)
        at_once = len(jax.tree.leaves((one.trained, one.reports))) if stage.table.split else 0
        found.append(Kept.of(partial(pullback, parts.chunk), one, at_once))
        return ()

    of_stage = Region((PIPE,))(besides, (PartitionSpec(), PartitionSpec(PIPE)))
    no_x = reshard(jnp.zeros(x.shape, x.dtype), spec_of(x))
    # A tick's numbers are arguments as they are when it runs: of constants, a backward may keep less.
    tick = _Tick(jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.bool_(True))
    arguments = (parts.trained, parts.fixed), no_x, parts.inputs, tick
    extras, statistics = jax.eval_shape(of_stage, *arguments)
    region = Region((PIPE,) if jax.tree.leaves((extras, statistics)) else (PIPE, *batch_only_axes))
    if keeps:
        jax.eval_shape(region(keep, ()), *arguments)
    return Carried(versions, stage, pools, region, x, extras, statistics, found[0] if keeps else None)


class _Tick(NamedTuple):
    """Of a row what a chunk is chosen by."""

    chunk: Array
    microbatch: Array
    age: Array
    active: Array
