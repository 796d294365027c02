"""Which activations a plan keeps by name: those that save most seconds in the memory that is left."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, product

import numpy as np

from axon.axes.execution import INPUT, OFFLOAD, SAVE, Remat
from axon.chips.target import Target
from axon.plan.predict.links import Bandwidths
from axon.plan.predict.memory import memory, of_chunk
from axon.plan.predict.seconds import ELEMENTWISE, REPEATED, seconds
from axon.plan.predict.shards import Shards

ROUNDING = 1e-9
"""By how much of the whole a sum in another order may differ."""


@dataclass(frozen=True, eq=False)
class Keeping:
    """Every set of the named activations of a layout's layers.

    `shards`: of any of the layout's runs. What a set saves, and its share of all bytes, is the same in the others.
    """

    shards: Shards
    target: Target
    bandwidths: Bandwidths | None

    def policies(self, shards: Shards, room: float) -> list[Remat]:
        """The policies worth trying of a run in so many bytes of a device: none, and what the best set keeps."""
        return ["none", self._policy(self.best(_share(shards, "full", room)))]

    def offloads(self, shards: Shards, room: float) -> list[Remat]:
        """The policies worth trying that send to the host: the best set kept and the others sent, of which one
        period's are on the device; all sent, and a block's input; that alone, and the best set kept."""
        kept = self.best(_share(shards, "full", room) - 1 / sum(shards.places))
        beside = self.best(_share(shards, {INPUT: OFFLOAD}, room))
        others = [name for name in self.names if name not in kept]
        return [
            *([{**dict.fromkeys(kept, SAVE), **dict.fromkeys(others, OFFLOAD)}] if others else []),
            dict.fromkeys([*self.names, INPUT], OFFLOAD),
            {**dict.fromkeys(beside, SAVE), INPUT: OFFLOAD},
        ]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.shards.split.work.names))

    def best(self, share: float) -> tuple[str, ...]:
        """The set that saves most, of those with at most this share of all bytes; of several the one with least."""
        sizes, saved = self._sets
        fitting = np.flatnonzero(sizes <= share + ROUNDING)
        if not len(fitting):
            return ()
        best = fitting[saved[fitting] >= saved[fitting].max() - ROUNDING * saved.max()]
        return tuple(compress(self.names, self._taken[best[sizes[best].argmin()]]))

    @cached_property
    def _taken(self) -> np.ndarray:
        """Every set, as a row of zeros and ones."""
        return np.array(list(product((0, 1), repeat=len(self.names))))

    @cached_property
    def _sets(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each set the share of all bytes, and the seconds that it saves."""
        sizes = np.array([self._waiting(name) for name in self.names]) - self._waiting()
        saved = self._computing() - np.array([self._computing(name) for name in self.names])
        return self._taken @ (sizes / max(1.0, sizes.sum())), self._taken @ saved

    def _policy(self, names: Collection[str]) -> Remat:
        return self.shards.split.work.policy(names)

    def _waiting(self, *names: str) -> float:
        return of_chunk(self.shards.under(self._policy(names))).residuals

    def _computing(self, *names: str) -> float:
        """Seconds of what the backward computes again, and of element-wise work."""
        return seconds(self.shards.under(self._policy(names)), self.target, self.bandwidths).of(REPEATED, ELEMENTWISE)


def _share(shards: Shards, remat: Remat, room: float) -> float:
    """How much of all named activations has room on a device besides what a policy takes."""
    least, everything = (memory(shards.under(one)).total for one in ("full", "minimal"))
    return (room - memory(shards.under(remat)).total) / max(1.0, everything - least)
