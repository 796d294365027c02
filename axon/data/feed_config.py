"""Feeds beside a corpus: the base of what `Train.data` names where batches are not the corpus' own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from axon.data.corpus import TEXT_ARRAYS, Data
from axon.data.feed import ALL, Batch, Feed, FeedContext, SequenceNumbers
from axon.data.prepared import BatchReader, NoRewards, Prepared, Question
from axon.data.tokenizer import Tokenizer, TokenizerFile
from axon.fields import leaves
from axon.runtime import Runtime


class TextConfig(Protocol):
    """Text as a configuration names it: `Data`, or examples as `Chats`."""

    @property
    def seq(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def held_out(self) -> float: ...
    @property
    def text(self) -> Data: ...
    def with_tokenizer(self, tokenizer: TokenizerFile) -> Any: ...
    def seq_of(self, model: Any) -> int: ...
    def prepare(self, report: Callable[[str], None] = print) -> Any: ...


@dataclass(frozen=True)
class FeedConfig(ABC):
    """Training batches by a feed of their own, beside a corpus: the base of frozen dataclasses as `Rollouts`.

    Args:
        data: the corpus, which has the tokenizer, the shape of a batch and the held-out text.
    """

    data: TextConfig

    @property
    def arrays(self) -> Mapping[str, str]:
        """Name → axes of the arrays of a batch; by default those of text."""
        return TEXT_ARRAYS

    @property
    def references(self) -> frozenset[str]:
        """Names of the frozen models, of `Train.references`, that the feed needs."""
        return frozenset()

    @property
    def batch(self) -> int:
        """Sequences in the global batch."""
        return self.data.batch

    @property
    def held_out(self) -> float:
        """See `Data`."""
        return self.data.held_out

    @property
    def text(self) -> Data:
        """The text that the run is evaluated on, and its tokenizer."""
        return self.data.text

    def with_tokenizer(self, tokenizer: TokenizerFile) -> Any:
        """See `Data`."""
        return self.data.with_tokenizer(tokenizer)

    def seq_of(self, model: Any) -> int:
        """Positions of a sequence."""
        return self.data.seq_of(model)

    def check_runtime(self, runtime: Runtime) -> None:
        """Raise `UserError` where batches cannot be made beside the run's runtime; by default they can."""
        return

    @abstractmethod
    def prepare(self, report: Callable[[str], None] = print) -> "FedCorpus":
        """Prepares the corpus, as `Data.prepare`, and what else the feed needs that is the same in every step."""
        ...


class PreparedText(Prepared, Protocol):
    """Prepared data of text."""

    @property
    def tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class FedCorpus(NoRewards, Prepared, ABC):
    """A prepared corpus, all but its training batches: the base of what `FeedConfig.prepare` returns."""

    config: FeedConfig
    corpus: PreparedText

    @property
    def arrays(self) -> Mapping[str, str]:
        return self.config.arrays

    @property
    def tokenizer(self) -> Tokenizer:
        return self.corpus.tokenizer

    def check_fits(self, model: Any, objective: Any, seq: int) -> None:
        self.corpus.check_fits(model, objective, seq)

    @abstractmethod
    def feed(self, context: FeedContext) -> Feed: ...

    def held_out(self, batches: int | None = None, sequences: SequenceNumbers = ALL) -> BatchReader:
        return self.corpus.held_out(batches, sequences)

    def questions(self, count: int) -> Sequence[Question]:
        return self.corpus.questions(count)

    @property
    def companions(self) -> Path | None:
        return self.corpus.companions

    @property
    def remarked(self) -> Mapping[str, Sequence[str]]:
        return self.corpus.remarked

    def text_bytes(self, batch: Batch) -> np.ndarray | None:
        return self.corpus.text_bytes(batch)

    def identity(self) -> dict[str, Any]:
        return self.corpus.identity() | {"feed": leaves(self.config)}

    def position(self, seed: int, step: int) -> str:
        return f"batch {step} of seed {seed}, by {type(self.config).__name__}"

    def documents(self, seed: int, step: int) -> list[dict[str, Any]]:
        """None: they are the feed's own."""
        return []
