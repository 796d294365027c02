"""Which keys are on which device, and when, while they travel between the devices that split a sequence.

A sequence is cut into 2C chunks for C devices, and device i has chunks i and 2C − 1 − i, its *low* and its *high* one:
under a causal mask all devices then have equal work (zig-zag; Zhu, github.com/zhuzilin/ring-flash-attention; Llama 3,
arXiv:2407.21783, section 3.3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from axon.axes import Names, permute, permute_or_keep
from axon.kernels.attention import Causal, Everything, Mask, SameDocument, Window, rules

LOW, HIGH = 0, 1
"""The two chunks of a device, along the first axis of arrays `2 batch chunk …`."""


@dataclass(frozen=True)
class Problem:
    """The work of a step, as constants of the program.

    Args:
        mask: of each of its products of a chunk of queries and a chunk of keys.
        start: index of a chunk's first query among the keys. low: whether there is a product of the low queries.
    """

    mask: Mask
    start: int = 0
    low: bool = True


@dataclass(frozen=True)
class Pair:
    """A product: which chunk of the device's queries, and which of the keys that are there; constants, or traced.

    `valid`: whether it counts.
    """

    queries: Any
    keys: Any
    valid: Any = True


class Route(Protocol):
    """How keys travel: in `steps` steps, after that in which each device meets its own."""

    @property
    def steps(self) -> int: ...

    @property
    def by_chunk(self) -> bool:
        """Whether a device's own two chunks are apart: neither sees the other."""
        ...

    def problem(self, step: int) -> Problem:
        """The problem of a step, from 1 on."""
        ...

    def pairs(self, problem: Problem, step: Any) -> Sequence[Pair]:
        """The products of a step, which may be traced."""
        ...

    def advance(self, x: Any) -> Any:
        """Arrays `2 batch chunk …` that travel, from where a step has them to where the next does."""
        ...

    def home(self, x: Any) -> Any:
        """The same, after the last step, back to the devices whose chunks they are of."""
        ...


@dataclass(frozen=True)
class Ring:
    """Every device meets the keys of every other, passed on from neighbour to neighbour (arXiv:2310.01889).

    Of the keys of a device s before it both of its chunks see the low one, whole; of one after it its high chunk sees
    both: two unmasked products in either case.
    """

    axes: Names
    size: int
    mask: Mask

    @property
    def steps(self) -> int:
        return self.size - 1

    @property
    def by_chunk(self) -> bool:
        return False

    def problem(self, step: int) -> Problem:
        return Problem(_unmasked(self.mask))

    def pairs(self, problem: Problem, step: Any) -> Sequence[Pair]:
        if not any(isinstance(rule, Causal) for rule in rules(self.mask)):
            return [Pair(queries, keys) for queries in (LOW, HIGH) for keys in (LOW, HIGH)]
        same = jnp.where(lax.axis_index(self.axes) >= step, LOW, HIGH)
        return [Pair(HIGH, LOW), Pair(same, same)]

    def advance(self, x: Any) -> Any:
        around = [(device, (device + 1) % self.size) for device in range(self.size)]
        return jax.tree.map(lambda leaf: permute(leaf, self.axes, around), x)

    def home(self, x: Any) -> Any:
        return self.advance(x)


@dataclass(frozen=True)
class Neighbours:
    """Every chunk meets those before it that its window reaches: they move a chunk on in each step.

    Chunk p is at place p of a line that goes along all devices and back. A chunk that would leave its end goes on from
    its beginning, where it meets nobody: so its gradient comes home like the others'.
    """

    axes: Names
    size: int
    mask: Mask
    window: int
    chunk: int

    @property
    def steps(self) -> int:
        return min(-(-(self.window - 1) // self.chunk), 2 * self.size - 1)

    @property
    def by_chunk(self) -> bool:
        return True

    def problem(self, step: int) -> Problem:
        low = step < self.size
        if (step + 1) * self.chunk <= self.window:
            return Problem(_unmasked(self.mask), 0, low)
        return Problem(_unmasked(self.mask) & Window(self.window), step * self.chunk, low)

    def pairs(self, problem: Problem, step: Any) -> Sequence[Pair]:
        device = lax.axis_index(self.axes)
        low = [Pair(LOW, LOW, device >= step)] if problem.low else []
        return [*low, Pair(HIGH, HIGH, 2 * self.size - 1 - device >= step)]

    def advance(self, x: Any) -> Any:
        return jax.tree.map(lambda leaf: self._moved(leaf, 1), x)

    def home(self, x: Any) -> Any:
        return jax.tree.map(lambda leaf: self._moved(leaf, -self.steps), x)

    def _moved(self, x: Array, places: int) -> Array:
        """`2 batch chunk …`, every chunk so many places along the line."""
        chunks = [
            self._arriving(x, LOW, target, places) + self._arriving(x, HIGH, target, places) for target in (LOW, HIGH)
        ]
        return jnp.stack(chunks)

    def _arriving(self, x: Array, source: int, target: int, places: int) -> Array:
        """What devices get as their chunk `target` of all chunks `source`; zeros where that is nothing."""
        pairs = []
        for device in range(self.size):
            place = (self._place(device, source) + places) % (2 * self.size)
            if (place >= self.size) == (target == HIGH):
                pairs.append((device, self._place(place, HIGH) if target == HIGH else place))
        return permute_or_keep(x[source], self.axes, pairs)

    def _place(self, device: int, chunk: int) -> int:
        """The place of a device's chunk; of a place beyond the fold, its device."""
        return device if chunk == LOW else 2 * self.size - 1 - device


def route(axes: Names, size: int, mask: Mask, seq: int) -> Route | str:
    """How keys of `seq` positions travel between `size` devices along the mesh axes; or why `mask` lets them not."""
    found = list(rules(mask))
    if other := [rule for rule in found if not isinstance(rule, Causal | Everything | SameDocument | Window)]:
        return f"mask {other[0]} has no ring"
    causal = any(isinstance(rule, Causal) for rule in found)
    window = min((rule.size for rule in found if isinstance(rule, Window)), default=seq)
    if window >= seq:
        return Ring(axes, size, mask)
    if not causal:
        return f"mask {mask} sees keys on one side without a limit, and on the other within a window"
    return Neighbours(axes, size, mask, window, seq // (2 * size))


def in_order(route: Route, first: int) -> list[tuple[Problem, range]]:
    """The steps of a route from `first` to the last but one, those that follow each other with one problem together."""
    middle = groupby(range(first, route.steps), route.problem)
    return [(problem, range(min(steps := list(each)), max(steps) + 1)) for problem, each in middle]


def _unmasked(mask: Mask) -> Mask:
    """`mask` where the indices allow every pair."""
    return SameDocument() if mask.by_document else Everything()
