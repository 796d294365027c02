"""Tokens to experts and back by `ragged_all_to_all`: each pair of devices sends as many rows as it has."""

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from axon.axes.specs import num_shards
from axon.parallel.expert.devices import ExpertMesh


class RaggedPlan(NamedTuple):
    """Where each copy of a token goes in one round, on one device.

    Copies are sent as they are sorted by device and expert, and received by device: `taken` from each `at` a place
    there, the first of `first` on.
    """

    copy: Array  # sorted copies: which one it is
    place: Array  # copies: its place among the sorted
    order: Array  # rows: the received row that comes here, sorted by expert
    row: Array  # received rows: where it goes
    sizes: Array  # experts of this device: how many rows each has
    sent: Array  # devices: how many rows each gets of this one's
    sent_from: Array  # devices: the first of them among the sorted
    sent_to: Array  # devices: where it is received there
    received: Array  # devices: how many rows come from each
    received_at: Array  # devices: the first of them here
    received_from: Array  # devices: where it is among those sorted there


@dataclass(frozen=True)
class Ragged:
    """An exchange in which a device receives `num_rows` in each round, in whatever shares from the others.

    Args:
        copies: how many a device has of its tokens, `tokens · k`. margin: by how much its rows exceed the balanced
            load. What does not fit is left for the next round.
    """

    Plan: ClassVar[Any] = RaggedPlan

    mesh: ExpertMesh
    copies: int
    margin: float

    @property
    def num_rows(self) -> int:
        """Of one device, in one round."""
        return ceil(self.margin * self.copies / num_shards(self.mesh.shared))

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
        place = jnp.zeros_like(copy).at[copy].set(jnp.arange(self.copies))

        by_expert = self._all_counts(group)  # from to expert
        counts = jnp.sum(by_expert, axis=2)
        begin = number * self.num_rows
        queued = jnp.cumsum(counts, axis=0) - counts  # from to: rows that come to a device before these
        low = jnp.clip(queued, begin, begin + self.num_rows)
        high = jnp.clip(queued + counts, begin, begin + self.num_rows)
        sorted_at = jnp.cumsum(counts, axis=1) - counts + low - queued  # from to: the first of them where they are

        order, row, sizes = self._sorted(by_expert[:, me], begin)
        own, here = (lambda x: x[me].astype(jnp.int32)), (lambda x: x[:, me].astype(jnp.int32))
        return RaggedPlan(
            copy=copy,
            place=place,
            order=order,
            row=row,
            sizes=sizes,
            sent=own(high - low),
            sent_from=own(sorted_at),
            sent_to=own(low - begin),
            received=here(high - low),
            received_at=here(low - begin),
            received_from=here(sorted_at),
        )

    def send(self, values: Array, plan: RaggedPlan) -> Array:
        """`copies …`, or `tokens …` of which each is sent k times, → `rows …`, those of no copy 0."""
        per_value = self.copies // values.shape[0]
        received = self._exchange(
            values[plan.copy // per_value], self.num_rows, plan.sent_from, plan.sent, plan.sent_to, plan.received
        )
        return received[plan.order]

    def back(self, rows: Array, plan: RaggedPlan) -> Array:
        """`rows …` → `copies …`, those that were not sent in this round 0."""
        returned = self._exchange(
            rows[plan.row], self.copies, plan.received_at, plan.received, plan.received_from, plan.sent
        )
        return returned[plan.place]

    def _sorted(self, counts: Array, begin: Array) -> tuple[Array, Array, Array]:
        """Received rows by expert, from how many each device sends to each expert here, `from expert`."""
        ends = jnp.cumsum(counts.reshape(-1))
        number = begin + jnp.arange(self.num_rows)
        source = jnp.searchsorted(ends, number, side="right")
        expert = jnp.where(number < ends[-1], source % self.mesh.local, self.mesh.local)
        order = jnp.argsort(expert, stable=True)
        row = jnp.zeros_like(order).at[order].set(jnp.arange(self.num_rows))
        return order, row, jnp.sum(expert[:, None] == jnp.arange(self.mesh.local), axis=0, dtype=jnp.int32)

    def _all_counts(self, group: Array) -> Array:
        """`from to expert`: how many copies each device has for each expert of each device."""
        groups = num_shards(self.mesh.exchanged) * self.mesh.local
        counts = jnp.sum(group[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)
        return lax.all_gather(counts, self.mesh.exchanged).reshape(-1, groups // self.mesh.local, self.mesh.local)

    def _exchange(self, values: Array, size: int, start: Array, sent: Array, to: Array, received: Array) -> Array:
        """Runs of rows sent, as `lax.ragged_all_to_all` has them: those of no device are 0."""
        wide = values.reshape(values.shape[0], -1)
        out = jnp.zeros((size, wide.shape[1]), values.dtype)
        found = lax.ragged_all_to_all(wide, out, start, sent, to, received, axis_name=self.mesh.exchanged)
        return found.reshape(size, *values.shape[1:])
