"""How a layout's attention sees whole sequences: what is sent in a layer, over which links, and behind which work."""

from dataclasses import dataclass
from functools import cached_property

from axon.axes.patterns import Names
from axon.layout.table import ULYSSES
from axon.parallel.context import exchanged_elements, gathered_elements, ring_elements
from axon.plan.predict.links import Links
from axon.plan.predict.shards import Shards

RING, EXCHANGE, GATHER, BOTH = "ring", "ulysses", "gather", "usp"


@dataclass(frozen=True)
class Context:
    """`Layout.context` of a device's step; by kind of block, as a ring in all of them.

    The elements that a position sends are those of `axon.parallel.context.choice`, as which layouts are chosen by.
    """

    shards: Shards

    @property
    def method(self) -> str:
        named = self.shards.layout.context
        return named if isinstance(named, str) else RING

    @cached_property
    def ring(self) -> Names:
        """The mesh axes around which keys travel, or over which they are gathered."""
        axes = self.shards.split.context_axes
        return {EXCHANGE: (), BOTH: tuple(a for a in axes if a != ULYSSES)}.get(self.method, axes)

    @cached_property
    def exchange(self) -> Names:
        """The mesh axes over which positions are exchanged for heads."""
        return tuple(a for a in self.shards.split.context_axes if a not in self.ring)

    @property
    def merges(self) -> int:
        """Steps in which what parts of the keys gave is merged."""
        return self.shards.split.size(self.ring) if self.method in (RING, BOTH) and self.ring else 0

    def seconds(self, number: int, links: Links) -> tuple[float, float]:
        """Of a period: of all that is sent, and of that part which a ring sends while it computes.

        A ring's backward sends keys again, and their gradients. That of gathered keys sums the gradients, and gathers
        again what remat has not kept; an all-to-all's is the same, after the forward's once more under remat.
        """
        again = 1 if self.shards.waits.computed != "none" else 0
        around = self._moved(number, self.ring)
        travel = links.gather(self.ring, around)
        swap = (2 + again) * links.exchange(self.exchange, self._moved(number, self.exchange))
        if self.method == GATHER:
            return (3 + again) * travel, 0.0
        return 3 * travel + swap, 3 * travel

    def _moved(self, number: int, axes: Names) -> float:
        """Bytes of the whole of which each device sends its part to all others."""
        split, size = self.shards.split, self.shards.split.size(axes)
        if size == 1:
            return 0.0
        heads, seq = split.size(split.placement.mesh_axes("heads")), split.work.program.seq
        sent = sum(self._elements(one, axes, heads, size, seq) for one in split.work.periods[number].attentions)
        return self.shards.tokens * split.work.compute * sent / heads * size / (size - 1)

    def _elements(self, kind, axes: Names, heads: int, size: int, seq: int) -> float:
        if axes == self.exchange:
            return exchanged_elements(kind, heads, size)
        return gathered_elements(kind, size) if self.method == GATHER else ring_elements(kind, size, seq)
