"""Which mesh axes split what while experts work: tokens, experts, the experts' width."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from axon.axes import Names, Scope
from axon.axes.specs import entries, mesh_axes_of, num_shards


@dataclass(frozen=True)
class ExpertMesh:
    """The devices of a layer of experts, by what their mesh axes do.

    Tokens are split by the rows of `batch.expert` and `seq.expert`, experts by that of `experts` for stored parameters,
    their width by that of `mlp.expert`, less what the other two use. Along `exchanged` tokens and experts are both
    split, and tokens are sent to their experts; along `shared` experts alone are, so that each device works for its
    own experts on the tokens that all have, and the results are summed.

    Args:
        count: how many experts there are. tokens: where `batch seq` lie. experts, mlp: the mesh axes of both.
    """

    scope: Scope
    count: int
    tokens: PartitionSpec
    experts: Names
    mlp: Names

    @classmethod
    def of(cls, scope: Scope, count: int) -> "ExpertMesh":
        """The division by the layout in `scope`, seen from outside of regions in which each device works alone."""
        tokens = scope.placement.spec(("batch.expert", "seq.expert"))
        experts = scope.placement.mesh_axes("experts", "params")
        used = {*mesh_axes_of(tokens), *experts}
        mlp = tuple(a for a in scope.placement.mesh_axes("mlp.expert") if a not in used)
        return cls(scope, count, tokens, experts, mlp)

    @property
    def exchanged(self) -> Names:
        return tuple(a for a in self.experts if a in mesh_axes_of(self.tokens))

    @property
    def shared(self) -> Names:
        return tuple(a for a in self.experts if a not in mesh_axes_of(self.tokens))

    @property
    def by_row(self) -> Names:
        """The mesh axes whose devices have rows of their own."""
        return (*mesh_axes_of(self.tokens), *self.shared)

    @property
    def replicas(self) -> Names:
        """The mesh axes whose devices have the same experts, and other tokens: over them gradients are summed."""
        return tuple(a for a in mesh_axes_of(self.tokens) if a not in self.experts)

    @property
    def local(self) -> int:
        """How many experts a device has."""
        return self.count // num_shards(self.experts)

    @property
    def x(self) -> PartitionSpec:
        """Of `batch seq embed`: the whole width of each token."""
        return PartitionSpec(*self.tokens, None)

    @property
    def rows(self) -> PartitionSpec:
        """Of what has one value for each row."""
        return PartitionSpec(self.by_row or None)

    @property
    def wide(self) -> PartitionSpec:
        """Of `copies rows embed`: each device along `mlp` has the same rows, or its own part of their sum."""
        return PartitionSpec(self.mlp or None, self.by_row or None, None)

    @property
    def inner(self) -> PartitionSpec:
        """Of `rows mlp`."""
        return PartitionSpec(self.by_row or None, self.mlp or None)

    def of_device(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`batch seq …` of one device, of the `shape` of all."""
        split = (num_shards(entries(entry)) for entry in self.tokens)
        return (*(size // count for size, count in zip(shape, split, strict=False)), *shape[2:])

    def destination(self, chosen: Array) -> Array:
        """Of each expert's number, `device · local + expert`: where along `exchanged` it is, and which one there.

        The product of both counts for those of another device along `shared`, and for -1, which is no expert.
        """
        sizes = [num_shards((a,)) for a in self.experts]
        places = np.unravel_index(np.arange(num_shards(self.experts)), sizes) if sizes else ()
        of = dict(zip(self.experts, places, strict=True))
        owner = jnp.maximum(chosen, 0) // self.local
        none = num_shards(self.exchanged) * self.local
        group = jnp.asarray(_index(of, self.exchanged))[owner] * self.local + chosen % self.local
        mine = chosen >= 0
        if self.shared:
            mine &= jnp.asarray(_index(of, self.shared))[owner] == lax.axis_index(self.shared)
        return jnp.where(mine, group, none)


def _index(of: dict[str, np.ndarray], mesh_axes: Names) -> np.ndarray:
    """The number of each device among those along these mesh axes."""
    number = np.zeros(len(next(iter(of.values()))) if of else 1, np.int32)
    for axis in mesh_axes:
        number = number * num_shards((axis,)) + of[axis].astype(np.int32)
    return number
