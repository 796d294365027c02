"""The examples of a split of the data, in sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from axon.data.batches import PADDING
from axon.data.feed import Batch
from axon.nn.adapter_set import ADAPTERS
from axon.tune.packing import Example, batch_of, digest_of, packed


class Packed(Protocol):
    """How examples are put in sequences; implemented by `axon.tune.examples.Examples`."""

    documents: ClassVar[str]

    @property
    def seq(self) -> int: ...
    @property
    def packed(self) -> int: ...
    @property
    def sources(self) -> Sequence[Any]: ...
    @property
    def weights(self) -> Sequence[float] | None: ...
    @property
    def adapters(self) -> Sequence[str]: ...
    @property
    def more(self) -> Mapping[str, np.ndarray]: ...


def adapter_of(data: Packed, source: int) -> str:
    """The adapter that a source's examples train; empty without any."""
    return data.adapters[source] if data.adapters else ""


@dataclass(frozen=True)
class Split:
    """The examples of a split, and which are in each sequence."""

    data: Packed
    examples: tuple[Example, ...] = field(repr=False)

    @cached_property
    def rows(self) -> list[list[int]]:
        """The numbers of the examples in each sequence."""
        return [row for rows in self._by_source for row in rows]

    @cached_property
    def _by_source(self) -> list[list[list[int]]]:
        """`rows` of each source, where sources have weights or adapters; else of all together."""
        if self.data.weights is None and not self.data.adapters:
            return [packed(self.examples, self.data.seq, self.data.packed)]
        first, of_sources = 0, []
        for source in range(len(self.data.sources)):
            own = [example for example in self.examples if example.source == source]
            rows = packed(own, self.data.seq, self.data.packed)
            of_sources.append([[first + number for number in row] for row in rows])
            first += len(own)
        return of_sources

    def span(self, source: int) -> tuple[int, int]:
        """The numbers of a source's sequences, where sources have weights: the first, and that after the last."""
        counts = [len(rows) for rows in self._by_source]
        return sum(counts[:source]), sum(counts[: source + 1])

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: np.ndarray) -> Batch:
        """The sequences with these numbers; of `PADDING` one without examples."""
        rows = [[] if row == PADDING else [self.examples[one] for one in self.rows[row]] for row in numbers.tolist()]
        batch = batch_of(rows, self.data.seq, self.data.documents, self.data.more)
        return batch | ({ADAPTERS: self._adapters(rows)} if self.data.adapters else {})

    def _adapters(self, rows: Sequence[Sequence[Example]]) -> np.ndarray:
        """The number of each sequence's adapter, int32; -1 of one without examples."""
        names = [*dict.fromkeys(self.data.adapters)]
        own = [names.index(adapter_of(self.data, row[0].source)) if row else PADDING for row in rows]
        return np.array(own, np.int32)

    def digest(self) -> str:
        """Of every id, and of which are learned."""
        return digest_of((document for example in self.examples for document in example.documents), 8).hex()

    @property
    def learned(self) -> int:
        """How many tokens are learned."""
        return sum(int(one.learned[1:].sum()) for example in self.examples for one in example.documents)

    @property
    def largest(self) -> int:
        """The largest id."""
        return max((int(one.ids.max()) for example in self.examples for one in example.documents), default=0)
