"""Look-up in a table whose rows may be split over devices."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Scope
from axon.axes.specs import mesh_axes_of, num_shards, partial_spec, without
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
    """Each device looks up the rows and columns that it holds, and the sum over devices has all rows (Megatron-LM,
    1909.08053).

    Columns that the layout stores apart, on mesh axes that split the tokens (ZeRO-3), stay there where the vectors
    of a device's tokens are fewer than the table's rows: the vectors then change hands, not the table.

    The gradient of the table is a sum over tokens: partial on each device until it is needed.
    """
    out = scope.placement.spec(("batch", "seq", "embed"))
    residual = scope.placement.spec(("batch", "seq.residual", "embed"))
    tokens = mesh_axes_of(out)
    held = tuple(a for a in scope.placement.mesh_axes(rows) if a not in tokens)
    own = axes.zero3_mesh_axes(scope.placement, "embed", tokens)
    own = own if ids.size // num_shards(tokens) < table.shape[0] else ()
    ids_spec = PartitionSpec(*(without(entry, own) for entry in out[:2]))
    table_spec = PartitionSpec(held or None, own or out[2])
    found_spec = PartitionSpec(*ids_spec, table_spec[1])

    def place(ids, size):
        index = ids - (lax.axis_index(held) * size if held else 0)
        return jnp.where((index >= 0) & (index < size), index, size)

    def read(table, ids):
        return table.at[place(ids, table.shape[0])].get(mode="fill", fill_value=0)

    @jax.custom_vjp
    def apply(table):
        stored = axes.reshard(table.astype(scope.compute), table_spec)
        found = axes.per_device(read, (table_spec, ids_spec), partial_spec(found_spec, held))
        vectors = found(stored, axes.reshard(ids, ids_spec))
        if own:
            vectors = axes.reshard(vectors, partial_spec(out, held if axes.supports_unreduced() else ()))
        return axes.reshard(vectors, residual)

    def backward(table, dy):
        def add(dy, ids):
            size = table.shape[0] // num_shards(held)
            zeros = jnp.zeros((size, dy.shape[-1]), scope.reduce)
            return zeros.at[place(ids, size)].add(dy.astype(scope.reduce), mode="drop")

        summed = partial_spec(table_spec, mesh_axes_of(ids_spec))
        of_vectors = axes.reshard(axes.reshard(dy, out), found_spec)
        dtable = axes.per_device(add, (found_spec, ids_spec), summed)(of_vectors, axes.reshard(ids, ids_spec))
        return (axes.as_cotangent(dtable, table),)

    apply.defvjp(lambda table: (apply(table), table), backward)
    return apply(table)
