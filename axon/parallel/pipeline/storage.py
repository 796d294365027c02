"""Layers between the order in which they are stored, that of the model, and that of a schedule's chunks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.parallel.pipeline.chunks import Chunks


def to_stages(layers: Any, chunks: Chunks, mesh_axis: str) -> Any:
    """What each stage stores of arrays with an axis `layers` in front → the layers of its own chunks, one by one.

    To be called by each stage, in a region that is manual over `mesh_axis`. A stage stores as many layers as it runs:
    those that come next in the model. A layer is sent once, unless it is where it runs already.
    """
    return _moved(layers, chunks, mesh_axis, {_stored(n, chunks): chunks.home(n) for n in range(chunks.total)})


def from_stages(layers: Any, chunks: Chunks, mesh_axis: str) -> Any:
    """The inverse of `to_stages`."""
    return _moved(layers, chunks, mesh_axis, {chunks.home(n): _stored(n, chunks) for n in range(chunks.total)})


def _stored(logical: int, chunks: Chunks) -> tuple[int, int]:
    """The stage that stores a chunk, and its place there."""
    stage, place = divmod(logical, chunks.virtual)
    return stage, place


def _moved(layers: Any, chunks: Chunks, mesh_axis: str, target: dict[tuple[int, int], tuple[int, int]]) -> Any:
    if all(source == to for source, to in target.items()):
        return layers
    places = range(chunks.virtual)

    def moved(x: Array) -> Array:
        parts = jnp.split(x, chunks.virtual)
        arrived = [jnp.zeros_like(part) for part in parts]
        for old in places:
            for new in places:
                pairs = [(s, t) for (s, at), (t, to) in target.items() if (at, to) == (old, new)]
                if pairs:  # a stage to which nothing is sent receives zeros
                    arrived[new] += lax.ppermute(parts[old], mesh_axis, pairs)
        return jnp.concatenate(arrived)

    return jax.tree.map(moved, layers)
