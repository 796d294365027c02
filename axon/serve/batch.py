"""A plan of the scheduler as the arrays of one compiled step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from axon.serve.pages import PagePool
from axon.serve.policy import Row, draws, variants
from axon.serve.sampler import SampleParams
from axon.serve.scheduler import Scheduled
from axon.serve.sequence import Sequence as Running
from axon.serve.step import StepInputs


@dataclass(frozen=True)
class Size:
    """Of a compiled step: how many tokens, and of how many of them logits are computed."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class Batch:
    """A step: what the model is given, and how tokens are drawn of its logits. `slots[rows]`: where each is kept."""

    inputs: StepInputs
    slots: np.ndarray
    draws: SampleParams


class Batches:
    """Makes steps of a few sizes. A running sequence has a slot, its place in every step, from its first step on.

    Args:
        pools: as the scheduler's. sizes: the smallest first. slots: how many sequences run at once, at most.
        positions: how many a sequence may have. vocab: ids that the model predicts. owners: of each rank the number of
        its adapter, as they are from step to step; None: there is no room for adapters.
    """

    def __init__(
        self,
        pools: Mapping[int | None, PagePool],
        sizes: Sequence[Size],
        slots: int,
        positions: int,
        vocab: int,
        owners: np.ndarray | None = None,
    ):
        self.sizes, self.slots, self.vocab, self._positions = tuple(sizes), slots, vocab, positions
        self._owners = owners
        columns = max(pool.pages_for(positions) for pool in pools.values())
        self._tables = {window: np.zeros((slots, columns), np.int32) for window in pools}
        self._pages: list[Mapping[int | None, list[int]]] = [{} for _ in range(slots)]  # what `_tables` has of each
        self._free = list(range(slots - 1, -1, -1))
        self._taken: dict[int, int] = {}

    def leave(self, sequence: Running) -> None:
        """A sequence has no place in the next steps, until it runs again."""
        slot = self._taken.pop(sequence.number, None)
        if slot is not None:
            self._free.append(slot)

    def ordered(self, scheduled: Sequence[Scheduled]) -> list[Scheduled]:
        """In the order of their slots, in which a step has them; a new one gets a slot."""
        return sorted(scheduled, key=lambda part: self.slot(part.sequence))

    def make(self, scheduled: Sequence[Scheduled], rows: Sequence[Row], size: Size | None = None) -> Batch:
        """The batch of what is `ordered`; `rows`: how each row is drawn, one part's after the other's.

        `size`: by default the smallest in which they have room.
        """
        size = size or self._size(sum(part.count for part in scheduled), len(rows))
        tokens, positions, last, adapters = np.zeros((4, size.tokens), np.int32)
        counts, lens, drafts, versions = np.zeros((4, self.slots), np.int32)
        places, slots = np.full(size.rows, -1, np.int32), np.full(size.rows, self.slots, np.int32)
        own = [self._taken[part.sequence.number] for part in scheduled]
        new, first, drawn, ends, guessed, version, adapter = _columns(scheduled)
        counts[own], lens[own] = new, first + new
        drafts[own], versions[own] = guessed, version
        found = [token for part, slot in zip(scheduled, own, strict=True) for token in self._tokens(part, slot)]
        after, after_row = np.cumsum(new), np.cumsum(drawn)  # of each part, in the step
        total, total_rows = len(found), int(drawn.sum())
        tokens[:total] = found
        positions[:total] = np.arange(total) + np.repeat(first - (after - new), new)
        last[:total] = np.repeat(ends - 1, new)
        adapters[:total] = np.repeat(adapter, new)
        places[:total_rows] = np.arange(total_rows) + np.repeat(after - after_row, drawn)
        for part, slot, row in zip(scheduled, own, after_row.tolist(), strict=True):
            if part.draws:
                slots[row - 1] = slot
            self._set_pages(part.sequence, slot)
        bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int32)], dtype=np.int32)
        tables = tuple(table.copy() for table in self._tables.values())
        own_ranks = () if self._owners is None else (adapters, self._owners.copy())
        inputs = StepInputs(tokens, positions, last, lens, bounds, tables, places, drafts, versions, *own_ranks)
        return Batch(inputs, slots, draws(rows, size.rows, self.vocab))

    def draws(self, size: Size) -> list[SampleParams]:
        """Draws of every shape that steps of this size can have."""
        return variants(size.rows, self.vocab, self._positions)

    def _size(self, tokens: int, rows: int) -> Size:
        return next(size for size in self.sizes if size.tokens >= tokens and size.rows >= rows)

    def slot(self, sequence: Running) -> int:
        """A sequence's place in every step; a new one gets one."""
        if sequence.number not in self._taken:
            self._taken[sequence.number] = self._free.pop()
        return self._taken[sequence.number]

    @staticmethod
    def _tokens(part: Scheduled, slot: int) -> Sequence[int]:
        known = part.sequence.tokens[part.start : part.start + part.count - len(part.drafts)]
        return [*known, *([-1 - slot] if part.from_device else []), *part.drafts]

    def _set_pages(self, sequence: Running, slot: int) -> None:
        if self._pages[slot] == sequence.pages:  # of most steps: a page lasts for many tokens
            return
        for window, table in self._tables.items():
            pages = sequence.pages[window]
            table[slot, : len(pages)] = pages
        self._pages[slot] = {window: [*pages] for window, pages in sequence.pages.items()}


def _columns(scheduled: Sequence[Scheduled]) -> np.ndarray:
    """Of each part how many tokens, the first one's position, how many rows, one past its sequence's last token, how
    many drafts, the version of its state, and the number of its adapter."""
    columns = [
        (
            *(part.count, part.start, part.rows, max(part.start + part.count, len(part.sequence.tokens))),
            *(len(part.drafts), part.state_version, part.sequence.adapter),
        )
        for part in scheduled
    ]
    return np.array(columns, np.int64).reshape(-1, 7).T
