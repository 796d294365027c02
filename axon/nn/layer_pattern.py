"""Depth of two kinds of block in turn."""

from collections.abc import Callable
from dataclasses import dataclass

from flax import nnx

from axon.nn.depth import Segment


@dataclass(frozen=True)
class LayerPattern:
    """Layers of two kinds: `times` of the first and one of the other, again and again; those that remain, fewer than a
    period has, are of the first.

        LayerPattern(26, 5, "local", "full")    # (local, local_2, … local_5, full) 4 times, and "last" twice
    """

    layers: int
    times: int
    first: str
    other: str

    def segments(self, first: Callable[[], nnx.Module], other: Callable[[], nnx.Module]) -> list[Segment]:
        """The segments of a `Depth`; `first` and `other` make a block each."""
        periods, rest = divmod(self.layers, self.times + 1)
        segments = []
        if periods:
            segments.append(Segment(periods, **{name: first() for name in self._firsts}, **{self.other: other()}))
        if rest:
            segments.append(Segment(rest, last=first()))
        return segments

    @property
    def _firsts(self) -> tuple[str, ...]:
        return tuple(self.first if i == 1 else f"{self.first}_{i}" for i in range(1, self.times + 1))
