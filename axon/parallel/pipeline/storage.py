"""Layers between where they are stored and where they run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from axon.axes import is_on_host, reshard
from axon.axes.memory import to_device, to_host
from axon.parallel.pipeline.chunks import Chunks
from axon.parallel.pipeline.partition import NOTHING, Partition, numbers

Place = tuple[int, int]
"""A stage, and a place there."""


class _Shift(NamedTuple):
    """What travels `distance` stages around the circle: `[stage, layer]`, the places it is taken from, and put in."""

    distance: int
    take: np.ndarray
    put: np.ndarray


class Storage:
    """Where a segment's periods are stored, and where they run.

    They are stored in the order of the model, `stored` on each stage, with padding at the end where they are fewer.
    Both moves are to be called by each stage, in a region that is manual over `mesh_axis`: of arrays with an axis
    `layers` in front. A layer is sent once, unless it is where it runs already; a place that no layer takes has zeros.
    """

    def __init__(self, partition: Partition, chunks: Chunks, mesh_axis: str):
        self.mesh_axis, self.stages = mesh_axis, chunks.stages
        self.numbers = np.asarray(numbers(partition, chunks))
        self.stored = -(-max(periods.stop for periods in partition) // chunks.stages)
        places = np.argwhere(self.numbers != NOTHING).tolist()
        self._runs_at: dict[Place, Place] = {
            divmod(int(self.numbers[stage, place]), self.stored): (stage, place) for stage, place in places
        }

    @property
    def runs(self) -> int:
        """Places of a stage where layers run."""
        return self.numbers.shape[1]

    def to_stages(self, layers: Any) -> Any:
        """What each stage stores → what it runs, chunk after chunk."""
        return self._moved(layers, self._runs_at, self.runs)

    def from_stages(self, layers: Any) -> Any:
        """The inverse of `to_stages`."""
        return self._moved(layers, {runs: stored for stored, runs in self._runs_at.items()}, self.stored)

    def _moved(self, layers: Any, target: Mapping[Place, Place], places: int) -> Any:
        if self.stored == self.runs and all(source == to for source, to in target.items()):
            return layers
        shifts = [shift for distance in range(self.stages) if (shift := self._shift(distance, target, places))]
        return jax.tree.map(lambda x: self._sent(x, shifts, places), layers)

    def _shift(self, distance: int, target: Mapping[Place, Place], places: int) -> _Shift | None:
        """What travels so far; a stage with fewer layers to send than others sends some that are put nowhere."""
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self.stages)]
        for (source, taken), (to, put) in target.items():
            if (to - source) % self.stages == distance:
                pairs[source].append((taken, put))
        if not (most := max(map(len, pairs))):
            return None
        take, put = np.zeros((self.stages, most), int), np.full((self.stages, most), places)
        for source, own in enumerate(pairs):
            for number, (taken, to) in enumerate(sorted(own)):
                take[source, number] = taken
                put[(source + distance) % self.stages, number] = to
        return _Shift(distance, take, put)

    def _sent(self, x: Array, shifts: list[_Shift], places: int) -> Array:
        stage = lax.axis_index(self.mesh_axis)
        empty = jnp.zeros((places + 1, *x.shape[1:]), x.dtype)  # the last place is nowhere
        arrived = reshard(empty, jax.typeof(x).sharding.spec)
        arrived = to_host(arrived) if is_on_host(x) else arrived
        for distance, take, put in shifts:
            layers = _rows(x, jnp.asarray(take)[stage])
            if distance:
                circle = [(source, (source + distance) % self.stages) for source in range(self.stages)]
                layers = lax.ppermute(layers, self.mesh_axis, circle)
            arrived = _with_rows(arrived, jnp.asarray(put)[stage], layers)
        return arrived[:places]


def _rows(x: Array, places: Array) -> Array:
    """Entries of the first axis, however the others are split, on the device."""
    return lax.map(lambda place: to_device(lax.dynamic_index_in_dim(x, place, keepdims=False)), places)


def _with_rows(x: Array, places: Array, rows: Array) -> Array:
    """`x` with these entries of the first axis replaced, one after the other."""

    def put(x: Array, one: tuple[Array, Array]) -> tuple[Array, None]:
        place, row = one
        row = to_host(row) if is_on_host(x) else row
        return lax.dynamic_update_index_in_dim(x, row, place, 0), None

    return lax.scan(put, x, (places, rows))[0]
