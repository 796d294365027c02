"""Look-up in a table whose rows may be split over devices."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Scope
from axon.nn.param import Dims, Param, normal


class Embedding(nnx.Module):
    """A table of vectors, one for each value of `axis`: `vocab` for tokens, `positions` for learned positions."""

    def __init__(self, axis: str, dims: Dims, stddev: float):
        self.table = Param(f"{axis} embed", dims, normal(stddev))

    @jax.named_scope("embedding")
    def __call__(self, ids: Array) -> Array:
        """`ids[batch seq]` → `batch seq.residual embed`, in the compute dtype."""
        table = self.table.get_value()
        scope = axes.current()
        return table[ids] if scope is None else _lookup(scope, self.table.axes[0], table, ids)


def _lookup(scope: Scope, rows: str, table: Array, ids: Array) -> Array:
    """Each device looks up the rows that it holds, and the sum over devices has them all (Megatron-LM, 1909.08053).

    The gradient of the table is a sum over tokens: partial on each device until it is needed.
    """
    out = scope.placement.spec(("batch", "seq", "embed"))
    residual = scope.placement.spec(("batch", "seq.residual", "embed"))
    tokens = [a for entry in out for a in axes.entries(entry)]
    held = tuple(a for a in scope.placement.mesh_axes(rows) if a not in tokens)
    table_spec, ids_spec = PartitionSpec(held or None, out[2]), PartitionSpec(out[0], out[1])

    def place(ids, size):
        index = ids - (lax.axis_index(held) * size if held else 0)
        return jnp.where((index >= 0) & (index < size), index, size)

    def read(table, ids):
        return table.at[place(ids, table.shape[0])].get(mode="fill", fill_value=0)

    @jax.custom_vjp
    def apply(table):
        stored = axes.move(table.astype(scope.compute), table_spec)
        found = axes.per_device(read, (table_spec, ids_spec), axes.partial_spec(out, held))
        return axes.move(found(stored, axes.move(ids, ids_spec)), residual)

    def backward(table, dy):
        def add(dy, ids):
            size = table.shape[0] // _ways(held)
            zeros = jnp.zeros((size, dy.shape[-1]), scope.reduce)
            return zeros.at[place(ids, size)].add(dy.astype(scope.reduce), mode="drop")

        summed = axes.partial_spec(table_spec, [a for entry in ids_spec for a in axes.entries(entry)])
        dtable = axes.per_device(add, (out, ids_spec), summed)(axes.move(dy, out), axes.move(ids, ids_spec))
        return (axes.as_cotangent(dtable, table),)

    apply.defvjp(lambda table: (apply(table), table), backward)
    return apply(table)


def _ways(mesh_axes: tuple[str, ...]) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in mesh_axes)
