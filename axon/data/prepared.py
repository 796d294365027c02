"""The data of a run once they are prepared, be it text or images."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from axon.data.batches import ALL, Batch, SequenceNumbers
from axon.data.tokenizer import Tokenizer


class BatchReader(Iterator[Batch], AbstractContextManager[Any], Protocol):
    """Batches read ahead; the end of the context stops that."""


class Prepared(Protocol):
    """Batches of two splits, in an order that a seed gives, and where each is from: `Corpus` or `Gallery`."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the text; None if it has none."""
        ...

    def check_fits(self, model: Any, objective: Any, seq: int) -> None:
        """Raise `UserError` unless `model` and `objective` take these batches, of `seq` positions."""
        ...

    def train(
        self, seed: int, start: int = 0, sequences: SequenceNumbers = ALL, left_out: Sequence[int] = ()
    ) -> BatchReader:
        """Training batches from global step `start` on, without end. Batch k depends on (seed, k) alone.

        `sequences`: which of the global batch to read, as a host's share. `left_out`: numbers of batches that are left
        out of the order; step `start` is counted without them.
        """
        ...

    def held_out(self, batches: int | None = None, sequences: SequenceNumbers = ALL) -> BatchReader:
        """The first `batches` (None: all) of the held-out split, in a fixed order; the last is padded with weight 0."""
        ...

    def text_bytes(self, batch: Batch) -> np.ndarray | None:
        """Bytes of text that each real target of a batch stands for, `batch seq`; None for images."""
        ...

    def identity(self) -> dict[str, Any]:
        """What the batches depend on, as JSON: the configuration, and under `digests` that of all content."""
        ...

    def position(self, seed: int, step: int) -> str:
        """Where batch `step` comes from, for messages."""
        ...

    def documents(self, seed: int, step: int) -> list[dict[str, Any]]:
        """Which text or images batch `step` is of, by their numbers in each source."""
        ...
