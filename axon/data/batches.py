"""Sequences of tokens → batches, in an order that is a pure function of (seed, step); grain mixes and prefetches."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Protocol

import grain
import numpy as np

from axon.data.feed import Batch, Feed, SequenceNumbers, numbered_without
from axon.data.tokens import Tokens
from axon.errors import UserError
from axon.train.state import State

PADDING = -1
TOGETHER = 8
"""Batches that a thread hands over at once, at most: waking another thread costs as much as reading a small batch."""
LENGTH = 2**40
"""Sequences of an order without end: more than a run sees. Of one as long as an index can be, grain fails to count the
batches."""
SMALL = 2**14
"""Tokens up to which batches are handed over together."""


class TokenSequences:
    """The sequences of one split, numbered through its sources; of a source the k-th: tokens[k·seq : (k+1)·seq + 1]."""

    def __init__(self, names: Sequence[str], tokens: Sequence[Tokens], seq: int):
        self.names = list(names)
        self.counts = [max(0, (one.count - 1) // seq) for one in tokens]
        self._tokens = list(tokens)
        self.seq = seq
        self._first = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._first[-1])

    def span(self, source: int) -> tuple[int, int]:
        """The numbers of one source's sequences: from the first up to, not including, the second."""
        return int(self._first[source]), int(self._first[source + 1])

    def tokens_of(self, source: int) -> Tokens:
        """The tokens of one source."""
        return self._tokens[source]

    def source_of(self, numbers: np.ndarray) -> np.ndarray:
        """Which source each sequence number belongs to."""
        return np.searchsorted(self._first, numbers, side="right") - 1

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """int32 `sequence seq+1`: the tokens of the sequences with these numbers."""
        sequences = np.empty((len(numbers), self.seq + 1), np.int32)
        sources = self.source_of(numbers)
        for source in np.unique(sources):
            mine = sources == source
            starts = (numbers[mine] - self._first[source]) * self.seq
            sequences[mine] = self._tokens[source].read(starts, self.seq + 1)
        return sequences


def pack(sequences: np.ndarray, bos: int) -> Batch:
    """What training sees of `sequences` (int32 `batch seq+1`): all arrays `batch seq`, padding absent.

    Documents begin where `bos` stands, and a sequence that begins inside one counts from there.
    """
    tokens = np.ascontiguousarray(sequences[:, :-1])
    begins = tokens == bos
    index = np.arange(tokens.shape[1], dtype=np.int32)
    documents = np.cumsum(begins, axis=1, dtype=np.int32)
    return {
        "tokens": tokens,
        "targets": np.ascontiguousarray(sequences[:, 1:]),
        "positions": index - np.maximum.accumulate(np.where(begins, index, 0), axis=1),
        "documents": documents - begins[:, :1],
        "weights": np.ones(tokens.shape, np.float32),
    }


def pad(batch: Batch, sequences: int) -> Batch:
    """`batch` with sequences of padding after it, up to `sequences`: document -1, weight 0."""
    if len(batch["tokens"]) == sequences:
        return batch
    fill = {"documents": PADDING}
    return {
        name: np.pad(array, ((0, sequences - len(array)), (0, 0)), constant_values=fill.get(name, 0))
        for name, array in batch.items()
    }


class OfSources(Sized, Protocol):
    """Sequences of several sources, one source after the other."""

    def span(self, source: int) -> tuple[int, int]:
        """The numbers of a source's sequences: the first, and that after the last."""
        ...


def check_weights(weights: Sequence[float] | None, sources: int, field: str) -> None:
    """Raise `UserError` unless these are how often each source is drawn from, or None."""
    if weights is None:
        return
    if len(weights) != sources:
        raise UserError(f"{field} has {len(weights)} numbers for {sources} sources: give one for each, or None.")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"{field} = {weights}: expected positive numbers; to leave a source out, remove it.")


def training_order(sequences: OfSources, weights: Sequence[float] | None, batch: int, seed: int) -> grain.MapDataset:
    """Sequence numbers `batch`, without end: batch k is element k, on every host.

    Without weights every sequence comes once per epoch; with them each source is repeated and shuffled on its own.
    """
    if weights is None:
        return shuffled_order(len(sequences), batch, seed)
    spans = [sequences.span(source) for source in range(len(weights))]
    each = [_shuffled(*span, seed, str(source)) for source, span in enumerate(spans)]
    return grain.MapDataset.mix(each, weights).batch(batch, batch_fn=np.asarray)


def shuffled_order(count: int, batch: int, seed: int) -> grain.MapDataset:
    """The numbers below `count`, `batch` at a time, reshuffled each epoch, without end."""
    return _shuffled(0, count, seed, "all").batch(batch, batch_fn=np.asarray)


def _shuffled(first: int, end: int, seed: int, stream: str) -> grain.MapDataset:
    """The numbers from `first` up to `end`, reshuffled each epoch, over and over: `LENGTH` of them or a few more."""
    digest = hashlib.blake2b(f"{seed}/data/{stream}".encode(), digest_size=4).digest()
    far_apart = int.from_bytes(digest)  # of neighbouring seeds: grain shuffles epoch e by seed + e
    return grain.MapDataset.range(first, end).shuffle(seed=far_apart).repeat(1 + LENGTH // (end - first))


def without(order: grain.MapDataset, left_out: Sequence[int]) -> grain.MapDataset:
    """`order` without the elements numbered `left_out`."""
    return grain.MapDataset.source(_Without(order, left_out)) if left_out else order


class _Without:
    def __init__(self, order: grain.MapDataset, left_out: Sequence[int]):
        self._order, self._left_out = order, tuple(left_out)

    def __len__(self) -> int:
        return len(self._order) - len(self._left_out)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.asarray(self._order[numbered_without(index, self._left_out)])


def held_out_order(items: Sized, batch: int) -> grain.MapDataset:
    """The numbers of a held-out split's items, once, in a fixed order that mixes sources; the last batch is short."""
    return grain.MapDataset.range(len(items)).seed(0).shuffle().batch(batch, drop_remainder=False, batch_fn=np.asarray)


class Batches(Iterator[Batch], Feed):
    """Batches read ahead in threads. `close` stops them; the end of a finite iterator closes it.

    Each element of `groups` is a list of batches that are read together.
    """

    def __init__(self, groups: grain.MapDataset, threads: int):
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
        self._inner = iter(groups.to_iter_dataset(options))
        self._inner.start_prefetch()
        self._each = itertools.chain.from_iterable(self._inner)

    def __next__(self) -> Batch:
        try:
            return next(self._each)
        except StopIteration:
            self.close()
            raise

    def draw(self, state: State) -> Batch:
        return next(self)

    def close(self) -> None:
        """Stops reading ahead, and drops what was prefetched. Safe to call twice."""
        self._inner.close()
        self._each = itertools.chain.from_iterable(self._inner)


def token_batches(
    order: grain.MapDataset, sequences: TokenSequences, bos: int, batch: int, mine: SequenceNumbers, threads: int
) -> Batches:
    """The batches of the sequences that `order` numbers, packed; of the last, sequences that are missing are
    padding."""

    def load(group: Sequence[np.ndarray]) -> list[Batch]:
        if (missing := batch - len(group[-1])) > 0:  # the last batch of all
            group = [*group[:-1], np.pad(group[-1], (0, missing), constant_values=PADDING)]
        ours = np.stack(group)[:, mine]
        numbers = ours[ours != PADDING]
        packed = pad(pack(sequences.read(numbers), bos), ours.size)
        parts = (array.reshape(*ours.shape, -1) for array in packed.values())
        return [dict(zip(packed, batch, strict=True)) for batch in zip(*parts, strict=True)]

    together = max(1, min(TOGETHER, SMALL // (batch * sequences.seq)))
    return Batches(order.batch(together, drop_remainder=False, batch_fn=load), threads)


WINDOW = 2**18
"""Tokens read at once."""


def documents_of(sequences: TokenSequences, numbers: np.ndarray, bos: int) -> list[tuple[int, dict[str, Any]]]:
    """Of each sequence, in ascending order: its source, and `sequence`, `first` and `last` document, from 0."""
    found = []
    sources = sequences.source_of(numbers)
    for source in np.unique(sources).tolist():
        own = np.unique(numbers[sources == source]) - sequences.span(source)[0]
        starts = own * sequences.seq
        begun = _begun_before(sequences.tokens_of(source), np.ravel([starts + 1, starts + sequences.seq], "F"), bos)
        for sequence, first, last in zip(own.tolist(), begun[::2], begun[1::2], strict=True):
            found.append((source, {"sequence": sequence, "first": first - 1, "last": last - 1}))
    return found


def _begun_before(tokens: Tokens, ends: np.ndarray, bos: int) -> list[int]:
    """How many documents begin among the tokens before each of `ends`, which ascend."""
    counts, position, begun = [], 0, 0
    for end in ends.tolist():
        while position < end:
            length = min(WINDOW, end - position)
            begun += int(np.count_nonzero(tokens.read(np.array([position]), length) == bos))
            position += length
        counts.append(begun)
    return counts
