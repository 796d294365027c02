"""A recurrence over sequences whose positions are split over devices: what each run of them has from those before.

A run is positions without a gap on one device: contiguous shards have one, those of a ring two (see `Positions`). All
runs are computed at once, each from what it would make of any state; what then travels is states, not positions.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.axes import Names, permute_or_keep
from axon.axes.specs import num_shards
from axon.parallel.context.positions import Positions, permuted


@dataclass(frozen=True)
class Runs:
    """The runs of a sequence, in a region that is manual over the mesh `axes` that split it; arrays `runs_batch …` have
    those of a device one after the other, each with all its sequences."""

    axes: Names
    positions: Positions

    @classmethod
    def of(cls, axes: Names, stored: np.ndarray) -> "Runs":
        """Those of a sequence whose positions are stored in this order. To be called outside of the region."""
        return cls(axes, Positions.of(stored, num_shards(axes)))

    @property
    def count(self) -> int:
        """How many there are, on all devices."""
        return self.positions.starts.size

    def split(self, x: Array) -> Array:
        """A device's part `batch seq …` → `runs_batch length …`, in the order of the positions."""
        x, (batch, _, *rest) = permuted(x, self.positions.order), x.shape
        return jnp.moveaxis(x.reshape(batch, self._own, -1, *rest), 1, 0).reshape(self._own * batch, -1, *rest)

    def joined(self, x: Array) -> Array:
        """The inverse of `split`."""
        (runs_batch, _), rest = x.shape[:2], x.shape[2:]
        batch = runs_batch // self._own
        x = jnp.moveaxis(x.reshape(self._own, batch, -1, *rest), 0, 1).reshape(batch, -1, *rest)
        return permuted(x, np.argsort(self.positions.order))

    def before(self, x: Array, by: int = 1) -> Array:
        """`runs_batch …` → for each run what the run `by` places before it has; zeros where there is none."""
        parts = jnp.split(x, self._own)
        return jnp.concatenate(
            [sum(self._sent(part, run, to, by) for run, part in enumerate(parts)) for to in range(self._own)]
        )

    @jax.default_matmul_precision("highest")
    def states(self, transition: Array, added: Array) -> Array:
        """The state before each run, `runs_batch … rows columns`: 0 before the first, and each run makes of S
        transition·S + added.

        By recursive doubling: after each step, `added` is what twice as many runs before make of 0 (Hillis and Steele,
        1986), so log₂ of their number are sent one after the other. Sent on from run to run, they would be as many.
        """
        transition, added, step = self.before(transition), self.before(added), 1
        while step < self.count - 1:
            earlier = self.before(transition, step), self.before(added, step)
            transition, added = transition @ earlier[0], transition @ earlier[1] + added
            step *= 2
        return added

    @property
    def _own(self) -> int:
        """How many each device has."""
        return self.positions.starts.shape[1]

    @cached_property
    def _places(self) -> np.ndarray:
        """`devices runs`: the place of each among all."""
        starts = self.positions.starts
        return np.argsort(np.argsort(starts, axis=None)).reshape(starts.shape)

    def _sent(self, x: Array, run: int, to: int, by: int) -> Array:
        """What the devices get of their runs number `run` for those number `to`, `by` places on."""
        apart = self._places[None, :, to] - self._places[:, None, run]
        return permute_or_keep(x, self.axes, [(int(a), int(b)) for a, b in np.argwhere(apart == by)])
