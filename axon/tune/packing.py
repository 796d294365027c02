"""Examples packed into sequences: several documents in one, none of which attends to another."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from axon.data.batches import PADDING
from axon.data.feed import Batch
from axon.data.records import Record

OPEN = 64
"""Sequences that are filled at a time: an example goes into the first of them that has room."""


@dataclass(frozen=True)
class Document:
    """The ids of a text; `weights`: how much each counts that is learned, 0 of the others; `more`: by name, arrays of
    which each row is of an id."""

    ids: np.ndarray
    weights: np.ndarray
    more: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def learned(self) -> np.ndarray:
        """A mask of the ids that are learned."""
        return self.weights > 0

    @property
    def weighs_alike(self) -> bool:
        """Whether all that is learned counts 1."""
        return bool(np.all((self.weights == 0) | (self.weights == 1)))

    def first(self, count: int) -> "Document":
        """A text's first ids; of a negative number, all but the last."""
        return Document(self.ids[:count], self.weights[:count], {name: of[:count] for name, of in self.more.items()})

    @property
    def positions(self) -> int:
        """How many predictions it has."""
        return len(self.ids) - 1


EMPTY = Document(np.zeros(1, np.int32), np.zeros(1, np.float32))
"""In the place of a document that an example lacks: no prediction."""


@dataclass(frozen=True)
class Example:
    """The documents of an example, as a chosen and a rejected one, or `EMPTY` for a side that it lacks; `where` they
    are from, the `record` that they are made of, and the number of its `source`."""

    documents: tuple[Document, ...]
    where: str
    record: Record = field(default_factory=dict, repr=False)
    source: int = 0

    @property
    def positions(self) -> int:
        """How many places of a sequence it takes."""
        return sum(one.positions for one in self.documents)

    @property
    def own(self) -> tuple[Document, ...]:
        """The documents that it has."""
        return tuple(one for one in self.documents if one is not EMPTY)


def digest_of(documents: Iterable[Document], size: int) -> bytes:
    """A digest, of `size` bytes, of every id of the documents and of what is learned."""
    digest = hashlib.blake2b(digest_size=size)
    for one in documents:
        learned = one.learned if one.weighs_alike else one.weights
        parts = one.ids, learned, *one.more.values()
        digest.update(b"".join(part.tobytes() + b"/" for part in parts))
    return digest.digest()


def packed(examples: Sequence[Example], seq: int, most: int) -> list[list[int]]:
    """The numbers of the examples in each sequence of `seq` positions, `most` of them in one; none is divided."""
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    for number, example in enumerate(examples):
        needed = example.positions
        row = next((row for row, left in room.items() if left >= needed), len(rows))
        if row == len(rows):
            rows.append([])
            room[row] = seq
            if len(room) > OPEN:
                del room[min(room, key=room.__getitem__)]
        rows[row].append(number)
        if row in room:
            room[row] -= needed
            if len(rows[row]) == most:
                del room[row]
    return rows


def batch_of(
    rows: Sequence[Sequence[Example]], seq: int, documents: str, more: Mapping[str, np.ndarray] = MappingProxyType({})
) -> Batch:
    """Arrays `batch seq` of the examples in each sequence; padding after them, and the weights of what is
    learned of the targets. `documents`: the name of the array of documents' numbers; `more`: by name, a row of
    `Document.more` as padding has it, and documents without it, of arrays `batch seq …` that are of the targets."""
    shape = len(rows), seq
    batch: Batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "positions")}
    batch |= {documents: np.full(shape, PADDING, np.int32), "weights": np.zeros(shape, np.float32)}
    batch |= {name: np.broadcast_to(one, (*shape, *one.shape)).copy() for name, one in more.items()}
    for row, examples in enumerate(rows):
        at = 0
        for number, one in enumerate(document for example in examples for document in example.documents):
            own = row, slice(at, at + one.positions)
            batch["tokens"][own], batch["targets"][own] = one.ids[:-1], one.ids[1:]
            batch["positions"][own], batch[documents][own] = np.arange(one.positions), number
            batch["weights"][own] = one.weights[1:]
            for name, of_targets in one.more.items():
                batch[name][own] = of_targets[1:]
            at += one.positions
    return batch
