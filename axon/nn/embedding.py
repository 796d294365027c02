"""Look-up in a table whose rows may be split over devices."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon import axes
from axon.axes import Names, Scope, StoredWeight
from axon.axes.specs import entries, mesh_axes_of, num_shards, partial_spec, without
from axon.nn.param import Dims, Param, normal
from axon.nn.weight_transform import Operand, Weight


class Embedding(nnx.Module):
    """A table of vectors, one for each value of `axis`: `vocab` for tokens, `positions` for learned positions."""

    def __init__(self, axis: str, dims: Dims, stddev: float):
        self.table: Weight = Param(f"{axis} embed", dims, normal(stddev))

    @jax.named_scope("embedding")
    def __call__(self, ids: Array) -> Array:
        """`ids[batch seq]` → `batch seq.residual embed`, in the compute dtype."""
        return _looked_up(self.table, ids)

    def flops(self, seq: int) -> int:
        """None: a look-up multiplies nothing."""
        return 0


def _looked_up(table: Weight, ids: Array) -> Array:
    """The rows of a table, which may be an operand that a transform made."""
    if isinstance(table, Operand):
        return table.looked_up(ids, _looked_up)
    value, scope = axes.stored_array(table, "Embedding"), axes.current()
    if scope is None:
        return value[ids]
    return axes.use_weight(scope, _LookUp(scope, table.axes, value.shape[0], ids.size), value, ids)


class _LookUp(axes.Operation):
    """Each device looks up the rows and columns that it holds, and the sum over devices has all rows (Megatron-LM,
    1909.08053).

    Columns that the layout stores apart, on mesh axes that split the tokens (ZeRO-3), stay there where the vectors
    of a device's tokens are fewer than the table's rows: the vectors then change hands, not the table.

    The gradient of the table is a sum over tokens: partial on each device until it is needed.

    Args:
        table: the names of the table's axes; size: of the first. tokens: how many are looked up, on all devices.
    """

    def __init__(self, scope: Scope, table: Names, size: int, tokens: int):
        self.scope, (rows, columns) = scope, table
        self.out = scope.placement.spec(("batch", "seq", columns))
        self.residual = scope.placement.spec(("batch", "seq.residual", columns))
        of_tokens = mesh_axes_of(self.out)
        self.row_axes = tuple(a for a in scope.placement.mesh_axes(rows) if a not in of_tokens)
        self.rows = size // num_shards(self.row_axes)
        apart = axes.zero3_mesh_axes(scope.placement, columns, of_tokens)
        self.apart = apart if tokens // num_shards(of_tokens) < size else ()
        self.ids = PartitionSpec(*(without(entry, self.apart) for entry in self.out[:2]))
        self.table = PartitionSpec(self.row_axes or None, self.apart or self.out[2])
        self.vectors = PartitionSpec(*self.ids, self.table[1])

    def forward(self, weight: StoredWeight, *operands: Array) -> tuple[Array, Array]:
        (ids,) = operands

        def read(table: Array, ids: Array) -> Array:
            return table.at[self._place(ids)].get(mode="fill", fill_value=0)

        look_up = axes.per_device(read, (self.table, self.ids), partial_spec(self.vectors, self.row_axes))
        vectors = look_up(weight.gathered(self.table), axes.reshard(ids, self.ids))
        if self.apart:
            # Exchanged while the sum over rows is still to be made, so that one collective makes it of fewer vectors.
            deferred = self.row_axes if axes.supports_unreduced() else ()
            for spec in self._exchange()[1:]:
                vectors = axes.reshard(vectors, partial_spec(spec, deferred))
        return axes.reshard(vectors, self.residual), ids

    def backward(self, weight: StoredWeight, saved: Array, cotangent: Array) -> tuple[Array | None, None]:
        if not weight.trained:
            return None, None

        def add(vectors: Array, ids: Array) -> Array:
            zeros = jnp.zeros((self.rows, vectors.shape[-1]), self.scope.reduce)
            return zeros.at[self._place(ids)].add(vectors.astype(self.scope.reduce), mode="drop")

        added = axes.per_device(add, (self.vectors, self.ids), partial_spec(self.table, mesh_axes_of(self.ids)))
        vectors = axes.reshard(cotangent, self.out)
        for spec in reversed(self._exchange()):
            vectors = axes.reshard(vectors, spec)
        return added(vectors, axes.reshard(saved, self.ids)), None

    def _exchange(self) -> list[PartitionSpec]:
        """From `vectors` to `out`, a dimension of the tokens at a time, the last mesh axis of the columns first.

        Of an exchange that splits two dimensions at once XLA makes a gather of all vectors of all tokens.
        """
        specs, left = [self.vectors], [a for a in self.apart if a in mesh_axes_of(self.out[:2])]
        while left:
            split = next(entries(entry) for entry in self.out[:2] if left[-1] in entries(entry))
            left = [a for a in left if a not in split]
            tokens = (without(entry, left) for entry in self.out[:2])
            specs.append(PartitionSpec(*tokens, (*entries(self.out[2]), *left) or None))
        return specs

    def _place(self, ids: Array) -> Array:
        """The row of each id in this device's part of the table; `rows`, which is none, where it is not there."""
        index = ids - (lax.axis_index(self.row_axes) * self.rows if self.row_axes else 0)
        return jnp.where((index >= 0) & (index < self.rows), index, self.rows)
