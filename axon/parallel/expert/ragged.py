"""Tokens to experts and back by `ragged_all_to_all`: each pair of devices sends as many rows as it has."""

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.axes.specs import num_shards
from axon.parallel.expert.devices import ExpertMesh
from axon.parallel.expert.token_assignments import TokenAssignments


class RaggedPlan(NamedTuple):
    """Where each copy of a token goes in one round, on one device.

    Copies are sent as they are sorted by device and expert, one run to each expert of each device, and received sorted
    by expert and device: runs of `sent` or `received` rows, each a run for the device and the expert it is for or from.
    """

    copy: Array  # sorted copies: which one it is
    place: Array  # copies: its place among the sorted
    is_sent: Array  # copies: whether it is sent in this round
    sizes: Array  # experts of this device: how many rows each has
    sent: Array  # runs that go: how many rows
    sent_from: Array  # runs that go: the first of them among the sorted
    sent_to: Array  # runs that go: where it is received
    received: Array  # runs that come: how many rows
    received_at: Array  # runs that come: the first of them here
    received_from: Array  # runs that come: where it is among those sorted there


@dataclass(frozen=True)
class Ragged:
    """An exchange in which a device receives `num_rows` in each round, in whatever shares from the others.

    Args:
        copies: how many a device has of its tokens, `tokens · k`. capacity_factor: by how much its rows exceed the
            balanced load. What does not fit is left for the next round.
    """

    Plan: ClassVar[Any] = RaggedPlan

    mesh: ExpertMesh
    copies: int
    capacity_factor: float

    @property
    def num_rows(self) -> int:
        """Of one device, in one round."""
        return ceil(self.capacity_factor * self.copies / num_shards(self.mesh.shared))

    @property
    def most_rounds(self) -> int:
        """How many rounds the worst load takes."""
        return -(-self.copies * num_shards(self.mesh.exchanged) // self.num_rows)

    def rounds(self, chosen: Array) -> Array:
        """How many rounds this load takes: the same number on all devices that exchange."""
        loads = jnp.sum(self._all_counts(self.mesh.destination(chosen)), axis=(0, 2))
        return lax.pmax(-(-jnp.max(loads) // self.num_rows), self.mesh.by_row)

    def plan(self, chosen: Array, number: Array) -> RaggedPlan:
        """The plan of a round, from each copy's expert."""
        group, me = self.mesh.destination(chosen), lax.axis_index(self.mesh.exchanged)
        copy = jnp.argsort(group, stable=True)
        place = jnp.argsort(copy)  # argsort of a permutation is its inverse

        counts = self._all_counts(group)  # from to expert
        total = jnp.sum(counts, axis=0)  # to expert
        queued = (jnp.cumsum(total, axis=1) - total)[None] + jnp.cumsum(counts, axis=0) - counts
        begin = number * self.num_rows
        low = jnp.clip(queued, begin, begin + self.num_rows)
        high = jnp.clip(queued + counts, begin, begin + self.num_rows)
        sorted_at = (jnp.cumsum(counts.reshape(len(counts), -1), axis=1)).reshape(counts.shape) - counts + low - queued

        own, here = (lambda x: x[me].reshape(-1)), (lambda x: x[:, me].reshape(-1))
        sent, sent_from = own(high - low), own(sorted_at)
        at = place[:, None]
        return RaggedPlan(
            copy=copy,
            place=place,
            is_sent=jnp.any((at >= sent_from) & (at < sent_from + sent), axis=1),
            sizes=jnp.sum((high - low)[:, me], axis=0),
            sent=sent,
            sent_from=sent_from,
            sent_to=own(low - begin),
            received=here(high - low),
            received_at=here(low - begin),
            received_from=here(sorted_at),
        )

    def send(self, values: Array, plan: RaggedPlan) -> Array:
        """`copies …`, or `tokens …` of which each is sent k times, → `rows …`; those of no copy may be anything."""
        copies = values.at[plan.copy // (self.copies // values.shape[0])].get(mode="promise_in_bounds")
        return self._exchange(copies, self.num_rows, plan.sent_from, plan.sent, plan.sent_to, plan.received)

    def back(self, rows: Array, plan: RaggedPlan) -> TokenAssignments:
        """`rows …` → those of each copy that was sent in this round."""
        returned = self._exchange(rows, self.copies, plan.received_at, plan.received, plan.received_from, plan.sent)
        return TokenAssignments(returned, plan.place, plan.is_sent)

    def _all_counts(self, group: Array) -> Array:
        """`from to expert`: how many copies each device has for each expert of each device."""
        groups = num_shards(self.mesh.exchanged) * self.mesh.local
        counts = jnp.sum(group[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)
        return lax.all_gather(counts, self.mesh.exchanged).reshape(-1, groups // self.mesh.local, self.mesh.local)

    def _exchange(self, values: Array, size: int, start: Array, sent: Array, to: Array, received: Array) -> Array:
        """Runs of rows sent, as `lax.ragged_all_to_all` has them: those of no run may be anything."""
        wide = values.reshape(values.shape[0], -1)
        out = lax.empty((size, wide.shape[1]), values.dtype)
        found = lax.ragged_all_to_all(wide, out, start, sent, to, received, axis_name=self.mesh.exchanged)
        return found.reshape(size, *values.shape[1:])
