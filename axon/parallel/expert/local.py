"""Tokens for the experts of their own device: copies are sorted, and nothing is sent."""

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.axes.specs import num_shards
from axon.parallel.expert.devices import ExpertMesh
from axon.parallel.expert.token_assignments import TokenAssignments


class LocalPlan(NamedTuple):
    """Where each copy of a token goes in one round, on one device."""

    copy: Array  # rows: which copy it is
    row: Array  # copies: its row
    is_row: Array  # copies: whether it has one in this round
    sizes: Array  # experts of this device: how many rows each has


@dataclass(frozen=True)
class Local:
    """Each device works on its own tokens, of which it takes `num_rows` copies in each round.

    Args:
        copies: how many a device has of its tokens, `tokens · k`. capacity_factor: by how much its rows exceed the
            balanced load, where devices that have the same tokens share their experts; without those every copy has a
            row.
    """

    Plan: ClassVar[Any] = LocalPlan

    mesh: ExpertMesh
    copies: int
    capacity_factor: float

    @property
    def num_rows(self) -> int:
        """Of one device, in one round."""
        return min(self.copies, ceil(self.capacity_factor * self.copies / num_shards(self.mesh.shared)))

    @property
    def most_rounds(self) -> int:
        """How many rounds the worst load takes."""
        return -(-self.copies // self.num_rows)

    def rounds(self, chosen: Array) -> Array:
        """How many rounds this load takes: the same number on all devices."""
        count = jnp.sum(self.mesh.destination(chosen) < self.mesh.local, dtype=jnp.int32)
        found = -(-count // self.num_rows)
        return lax.pmax(found, self.mesh.by_row) if self.mesh.by_row else found

    def plan(self, chosen: Array, number: Array) -> LocalPlan:
        """The plan of a round, from each copy's expert."""
        expert, begin = self.mesh.destination(chosen), number * self.num_rows
        order = jnp.argsort(expert, stable=True)
        counts = jnp.sum(expert[:, None] == jnp.arange(self.mesh.local), axis=0, dtype=jnp.int32)
        ends = jnp.cumsum(counts)
        sizes = jnp.clip(ends - begin, 0, self.num_rows) - jnp.clip(ends - counts - begin, 0, self.num_rows)
        row = jnp.argsort(order) - begin  # argsort of a permutation is its inverse
        is_row = (row >= 0) & (row < jnp.sum(sizes))
        padded = jnp.pad(order, (0, self.num_rows * self.most_rounds - self.copies))
        copy = lax.dynamic_slice_in_dim(padded, begin, self.num_rows)
        return LocalPlan(copy, jnp.where(is_row, row, 0), is_row, sizes)

    def send(self, values: Array, plan: LocalPlan) -> Array:
        """`copies …`, or `tokens …` of which each is sent k times, → `rows …`; those of no copy may be anything."""
        return values.at[plan.copy // (self.copies // values.shape[0])].get(mode="promise_in_bounds")

    def back(self, rows: Array, plan: LocalPlan) -> TokenAssignments:
        """`rows …` → those of each copy that has one in this round."""
        return TokenAssignments(rows, plan.row, plan.is_row)
