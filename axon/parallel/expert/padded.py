"""Tokens to experts and back by `all_to_all`, with the same number of places for each pair of devices."""

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.axes.specs import num_shards
from axon.parallel.expert.devices import ExpertMesh
from axon.parallel.expert.token_assignments import TokenAssignments


class PaddedPlan(NamedTuple):
    """Where each copy of a token goes in one round, on one device; a copy past the last means none."""

    copy: Array  # places: which copy is sent from it
    place: Array  # copies: the place that it is sent from
    is_sent: Array  # copies: whether it is sent in this round
    order: Array  # rows: the received place whose row comes here, sorted by expert
    row: Array  # places: the row that what is received there becomes
    sizes: Array  # experts of this device: how many rows each has


@dataclass(frozen=True)
class Padded:
    """An exchange with `places` rows from each device to each other, for each round.

    Args:
        copies: how many a device has of its tokens, `tokens · k`. capacity_factor: by how much the places exceed the
            balanced load. What does not fit is left for the next round.
    """

    Plan: ClassVar[Any] = PaddedPlan

    mesh: ExpertMesh
    copies: int
    capacity_factor: float

    @property
    def places(self) -> int:
        """Of one pair of devices."""
        peers, shared = num_shards(self.mesh.exchanged), num_shards(self.mesh.shared)
        return min(self.copies, ceil(self.capacity_factor * self.copies / (peers * shared)))

    @property
    def num_rows(self) -> int:
        """Of one device, in one round."""
        return self.places * num_shards(self.mesh.exchanged)

    @property
    def most_rounds(self) -> int:
        """How many rounds the worst load takes."""
        return -(-self.copies // self.places)

    def rounds(self, chosen: Array) -> Array:
        """How many rounds this load takes: the same number on all devices that exchange."""
        found = -(-jnp.max(self._counts(self.mesh.destination(chosen))) // self.places)
        return lax.pmax(found, self.mesh.by_row)

    def plan(self, chosen: Array, number: Array) -> PaddedPlan:
        """The plan of a round, from each copy's expert."""
        peers, local = num_shards(self.mesh.exchanged), self.mesh.local
        group = self.mesh.destination(chosen)
        order = jnp.argsort(group, stable=True)
        counts = self._counts(group)
        first = jnp.cumsum(counts) - counts
        begin = number * self.places

        position = (first + begin)[:, None] + jnp.arange(self.places)
        is_filled = begin + jnp.arange(self.places) < counts[:, None]
        copy = jnp.where(is_filled, order.at[position].get(mode="clip"), self.copies).reshape(-1)

        rank = jnp.argsort(order)  # argsort of a permutation is its inverse
        peer = jnp.minimum(group // local, peers - 1)
        index = rank - (first + begin)[peer]
        fits = (group < peers * local) & (index >= 0) & (index < self.places)
        place = jnp.where(fits, peer * self.places + index, 0)

        expert = self._exchange(jnp.where(copy < self.copies, group.at[copy].get(mode="clip") % local, local))
        sorted_by_expert = jnp.argsort(expert, stable=True)
        row = jnp.argsort(sorted_by_expert)
        sizes = jnp.sum(expert[:, None] == jnp.arange(local), axis=0, dtype=jnp.int32)
        return PaddedPlan(copy, place, fits, sorted_by_expert, row, sizes)

    def send(self, values: Array, plan: PaddedPlan) -> Array:
        """`copies …`, or `tokens …` of which each is sent k times, → `rows …`, those of no copy 0."""
        per_value = self.copies // values.shape[0]
        filled = values.at[plan.copy // per_value].get(mode="fill", fill_value=0)
        return self._exchange(filled)[plan.order]

    def back(self, rows: Array, plan: PaddedPlan) -> TokenAssignments:
        """`rows …` → those of each copy that was sent in this round."""
        return TokenAssignments(self._exchange(rows[plan.row]), plan.place, plan.is_sent)

    def _counts(self, group: Array) -> Array:
        """How many copies go to each device."""
        peer = group // self.mesh.local
        return jnp.sum(peer[:, None] == jnp.arange(num_shards(self.mesh.exchanged)), axis=0, dtype=jnp.int32)

    def _exchange(self, places: Array) -> Array:
        """Each pair's places, sent."""
        return lax.all_to_all(places, self.mesh.exchanged, 0, 0, tiled=True)
