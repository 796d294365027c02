"""Replicas: copies of a training state along the mesh axis `replica`, the slowest link, that are free to differ.

Arrays of which each replica has its own carry the named axis `replicas` in front. Code that no replica shares runs
manual over `replica` and automatic over every other mesh axis, so that the layout's table goes on to hold inside.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import reshard
from axon.axes.patterns import base
from axon.layout import KINDS, LayoutError, Placement

REPLICA = "replica"
"""The mesh axis."""

REPLICAS = "replicas"
"""The named axis that lies on it."""


def check_replicas(placement: Placement, who: str) -> int:
    """The number of replicas. Raises `LayoutError` unless the mesh has several, and they split the batch alone."""
    count = placement.mesh.shape.get(REPLICA, 1)
    if count < 2:
        mesh = ", ".join(f"{name!r}: {size}" for name, size in placement.mesh.shape.items())
        raise LayoutError(
            f"{who} joins replicas over a slow link, and Layout.mesh = {{{mesh}}} has no mesh axis {REPLICA!r} of 2 or "
            f"more. Give it one, as in Layout.mesh = {{{REPLICA!r}: 2, 'data': -1}}, or train without {who}"
        )
    if problems := list(_misplaced(placement)):
        raise LayoutError("\n".join(f"{who} needs replicas that are whole: {problem}" for problem in problems))
    return count


def _misplaced(placement: Placement) -> Iterator[str]:
    if placement.mesh_axes("batch")[:1] != (REPLICA,):
        row = placement.row("batch")
        yield (
            f"{REPLICA!r} comes first in the row of 'batch', which is {row}. Set "
            f"Layout.rows = {{'batch': ({REPLICA!r}, 'data')}}"
        )
    for kind in KINDS:
        where = f"Layout.{'rows' if kind == 'activations' else kind}"
        for name, row in placement.tables[kind].items():
            if name == REPLICAS and row != (REPLICA,):
                yield f"{where} puts {name!r} on {row}. Take that row out"
            if REPLICA in row and base(name) not in ("batch", REPLICAS):
                yield f"{where} splits {name!r} over {REPLICA!r}. Take {REPLICA!r} out of that row"


def per_replica(fn: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`fn(shared, own, batch)` → `(own, common)`, run by each replica by itself.

    `shared` is the same on every replica; `own`, given and returned, has the axis `replicas` in front outside and not
    inside; of `batch` each replica sees its own rows; `common` must be made equal by `fn`, with collectives.
    """

    def inside(shared, own, batch):
        own, common = fn(shared, jax.tree.map(lambda x: lax.squeeze(x, [0]), own), batch)
        return jax.tree.map(lambda x: lax.expand_dims(x, [0]), own), common

    split, whole = PartitionSpec(REPLICA), PartitionSpec()
    return jax.shard_map(
        inside, in_specs=(whole, split, split), out_specs=(split, whole), axis_names={REPLICA}, check_vma=False
    )


def stacked_spec(spec: PartitionSpec) -> PartitionSpec:
    """The spec of an array with `replicas` in front of axes that lie under `spec`."""
    return PartitionSpec(REPLICA, *spec)


def stacked(x: Array, count: int, spec: PartitionSpec) -> Array:
    """`x`, which lies under `spec`, once for each of `count` replicas: no data moves between them."""
    return reshard(jnp.broadcast_to(x[None], (count, *x.shape)), stacked_spec(spec))


def mean_over_replicas(x: Array, spec: PartitionSpec) -> Array:
    """The mean over the axis `replicas` in front, under `spec`: an all-reduce over the slow link."""
    return reshard(jnp.mean(x, axis=0), spec)
