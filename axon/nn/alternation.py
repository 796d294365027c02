"""Depth of two kinds of block in turn."""

from collections.abc import Callable
from dataclasses import dataclass

from flax import nnx

from axon.nn.depth import Segment


@dataclass(frozen=True)
class Alternation:
    """Layers of two kinds: `times` of the first and one of the other, again and again; those that remain, fewer than a
    period has, are of the first.

        Alternation(26, 5, "local", "full")    # (local, local_2, … local_5, full) 4 times, and "last" twice
    """

    layers: int
    times: int
    first: str
    other: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds of block, by which `remat` can be given."""
        periods, rest = divmod(self.layers, self.times + 1)
        return (*self._firsts, self.other) * bool(periods) + ("last",) * bool(rest)

    def segments(self, first: Callable[[], nnx.Module], other: Callable[[], nnx.Module]) -> list[Segment]:
        """Those of a `Depth`; `first` and `other` make a block each."""
        periods, rest = divmod(self.layers, self.times + 1)
        found = []
        if periods:
            found.append(Segment(periods, **{name: first() for name in self._firsts}, **{self.other: other()}))
        if rest:
            found.append(Segment(rest, last=first()))
        return found

    @property
    def _firsts(self) -> tuple[str, ...]:
        return tuple(self.first if i == 1 else f"{self.first}_{i}" for i in range(1, self.times + 1))
