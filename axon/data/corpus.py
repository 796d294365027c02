"""`Data`, what a person writes, and `Corpus`, what it prepares: text of any source as batches of packed tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from axon.checks import check_range
from axon.data.batches import (
    Batches,
    TokenSequences,
    check_weights,
    documents_of,
    held_out_order,
    token_batches,
    training_order,
    without,
)
from axon.data.enough import check_sequences, check_vocab, label, use_text
from axon.data.feed import ALL, Batch, FeedContext, SequenceNumbers
from axon.data.prepare import SPLITS, Stored, train_tokenizer, write_tokens
from axon.data.prepared import NoChats
from axon.data.records import Files
from axon.data.sources import Source, Stdlib
from axon.data.store import Root
from axon.data.tokenizer import Bpe, Tokenizer, TokenizerFile
from axon.data.tokens import open_tokens
from axon.disk import check_paths
from axon.errors import UserError
from axon.fields import RESUMABLE, StoreLocation

TEXT_ARRAYS: Mapping[str, str] = dict.fromkeys(("tokens", "targets", "positions", "documents", "weights"), "batch seq")
"""Name → axes of the arrays of a batch of text."""


@dataclass(frozen=True)
class Data:
    """Text to train on.

    Attributes:
        seq: positions in a sequence.
        batch: sequences in the global batch.
        sources: where the text comes from.
        weights: how often each source is drawn from, relative to the others; None: each as large as it is.
        tokenizer: trained here, or a file.
        held_out: fraction of the documents held out for evaluation, by the hash of their text; 1: all of them.
        store: folder or TensorStore URL for tokenizers and tokens; None: `$AXON_CACHE`, else `~/.cache/axon`.
        threads: how many prefetch batches; 0: no prefetching.
    """

    seq: int
    batch: int
    sources: tuple[Source, ...] = (Stdlib(),)
    weights: tuple[float, ...] | None = None
    tokenizer: Bpe | TokenizerFile = Bpe()
    held_out: float = 0.01
    store: StoreLocation | None = field(default=None, metadata=RESUMABLE)
    threads: int = field(default=2, metadata=RESUMABLE)

    def __post_init__(self):
        check_range(self, "[1, 2**31)", "seq", "batch")
        check_range(self, "[0, 256]", "threads")
        check_range(self, "[0, 1]", "held_out")
        check_paths(self)
        if self.held_out == 1 and isinstance(self.tokenizer, Bpe):
            raise UserError("Data.held_out = 1 leaves no text to train a Bpe on: lower it, or give a TokenizerFile.")
        check_sources(self.sources, "Data.sources")
        check_weights(self.weights, len(self.sources), "Data.weights")

    def prepare(self, report: Callable[[str], None] = print) -> "Corpus":
        """Collects the text, trains the tokenizer and writes the tokens, or reuses what an equal Data stored before.

        Each part is stored atomically, and several processes may prepare the same at once. `report` is called with a
        line for each step: what was done and how long it took, or that it was reused.

        Raises:
            UserError: a source or tokenizer cannot be read, or a split is smaller than one sequence.
        """
        root = Root(self.store)
        sources = [source.listed() if isinstance(source, Files) else source for source in self.sources]
        if isinstance(self.tokenizer, TokenizerFile):
            tokenizer = self.tokenizer.load()
        else:
            tokenizer = train_tokenizer(self.tokenizer, sources, self.held_out, root, report)
        for source in sources:
            for line in source.notices() if isinstance(source, Files) else ():
                report(line)
        stored = [write_tokens(source, tokenizer, self.held_out, root, report) for source in sources]
        sequences = {
            split: TokenSequences(
                [one.source for one in stored],
                [open_tokens(root, f"{one.part}/{split}", one.splits[split], tokenizer.vocab) for one in stored],
                self.seq,
            )
            for split in SPLITS
        }
        for number in range(len(stored)):
            report(use_text(self, sequences, stored, number))
        check_sequences(self, sequences, stored)
        return Corpus(self, tokenizer, stored, sequences)

    @property
    def text(self) -> "Data":
        """The text that a run is evaluated on, and its tokenizer: this."""
        return self

    def with_tokenizer(self, tokenizer: TokenizerFile) -> "Data":
        """What a trained model is evaluated on: this by the tokenizer that it was trained with."""
        return replace(self, tokenizer=tokenizer)

    def seq_of(self, model: Any) -> int:
        """Positions of a sequence: as the text is cut, whatever the model."""
        return self.seq

    def identity(self) -> dict[str, Any]:
        """What the batches depend on, as JSON: every field but `store` and `threads`."""
        return {
            "seq": self.seq,
            "batch": self.batch,
            "sources": [_described(source) for source in self.sources],
            "weights": list(self.weights) if self.weights else None,
            "tokenizer": _described(self.tokenizer),
            "held_out": self.held_out,
        }


@dataclass(frozen=True)
class Corpus(NoChats):
    """Prepared text: a tokenizer, and batches of two splits. Returned by `Data.prepare`."""

    data: Data
    tokenizer: Tokenizer
    _stored: list[Stored] = field(repr=False)
    _sequences: dict[str, TokenSequences] = field(repr=False)

    @property
    def arrays(self) -> Mapping[str, str]:
        """Name → axes of the arrays of a batch."""
        return TEXT_ARRAYS

    def check_fits(self, model: Any, objective: Any, seq: int) -> None:
        """Raise `UserError` unless `model` has an id for every token of the text, and then as many as are the
        objective's own: its tokenizer may have more."""
        check_vocab(model, objective, seq, self.tokenizer, self._stored)

    def train(
        self, seed: int, start: int = 0, sequences: SequenceNumbers = ALL, left_out: Sequence[int] = ()
    ) -> Batches:
        """Training batches from global step `start` on, without end: dicts of NumPy arrays, all `batch seq`.

        int32 tokens, targets, positions (from 0 in each document and sequence) and documents (0, 1, … in each
        sequence), float32 weights. Batch k depends on (seed, k) alone. `sequences`: which of the global batch to read,
        as a host's share. `left_out`: numbers of batches that are left out of the order; step `start` is counted
        without them.
        """
        self._need("train")
        order = without(self._order(seed), left_out)
        return self._batches("train", order[start:], sequences)

    def feed(self, context: FeedContext) -> Batches:
        """As of `Prepared`: `train`."""
        return self.train(context.seed, context.start, context.sequences, context.left_out)

    def held_out(self, batches: int | None = None, sequences: SequenceNumbers = ALL) -> Batches:
        """The first `batches` (None: all) of the held-out split, in a fixed order; the last is padded with weight 0."""
        self._need("held_out")
        order = held_out_order(self._sequences["held_out"], self.data.batch)
        return self._batches("held_out", order[:batches], sequences)

    def text_bytes(self, batch: Batch) -> np.ndarray:
        """Bytes of text that each target stands for, `batch seq` int32; 0 for padding."""
        return batch["weights"].astype(np.int32) * self.tokenizer.byte_lengths[batch["targets"]].astype(np.int32)

    def describe(self) -> dict[str, dict[str, dict[str, Any]]]:
        """split → source → documents, tokens, bytes of text, bytes that the tokens stand for, digest, sequences."""
        return {
            split: {
                label(self._stored, number): one.splits[split] | {"sequences": sequences.counts[number]}
                for number, one in enumerate(self._stored)
            }
            for split, sequences in self._sequences.items()
        }

    def identity(self) -> dict[str, Any]:
        """`Data.identity()` and a digest of every token: equal only where the batches are."""
        digests = {split: [one.splits[split]["digest"] for one in self._stored] for split in SPLITS}
        return self.data.identity() | {"digests": digests["train"], "held_out_digests": digests["held_out"]}

    def position(self, seed: int, step: int) -> str:
        """Where batch `step` comes from, for messages: each source's epoch, and which of its sequences."""
        sequences = self._sequences["train"]
        numbers = np.asarray(self._order(seed)[step])
        sources = sequences.source_of(numbers)
        shares = np.array(self.data.weights or sequences.counts) / sum(self.data.weights or sequences.counts)
        listed = []
        for source in np.unique(sources).tolist():
            epoch = step * self.data.batch * shares[source] / sequences.counts[source]
            shown = _shown(numbers[sources == source] - sequences.span(source)[0])
            listed.append(f"{label(self._stored, source)} (epoch {epoch:.2f}) sequences {shown}")
        return f"batch {step} of seed {seed}: {'; '.join(listed)}"

    def documents(self, seed: int, step: int) -> list[dict[str, Any]]:
        """Which text batch `step` is of: for each run of sequences, its source, and the numbers of its documents.

        `documents` are numbered from 0, in the source's order, through those of its training split: `first` and
        `last` of them, both included. The tokens before are read to count them.
        """
        sequences = self._sequences["train"]
        found = documents_of(sequences, np.asarray(self._order(seed)[step]), self.tokenizer.bos)
        return [{"source": label(self._stored, source), **where} for source, where in found]

    def _order(self, seed: int) -> Any:
        return training_order(self._sequences["train"], self.data.weights, self.data.batch, seed)

    def _batches(self, split: str, order: Any, mine: SequenceNumbers) -> Batches:
        data = self.data
        return token_batches(order, self._sequences[split], self.tokenizer.bos, data.batch, mine, data.threads)

    def _need(self, split: str) -> None:
        if not len(self._sequences[split]):
            raise UserError(f"The {split} split is empty: Data.held_out = {self.data.held_out}.")


def _described(part: Any) -> dict[str, Any]:
    return {"type": type(part).__name__, **asdict(part)}


def _shown(numbers: np.ndarray) -> str:
    first = ", ".join(str(number) for number in islice(numbers.tolist(), 16))
    return first + (", …" if len(numbers) > 16 else "")


def check_sources(sources: tuple[Source, ...], field: str) -> None:
    """Raise `UserError` unless the field has a tuple of at least one source."""
    if not isinstance(sources, (tuple, list)) or not sources:
        raise UserError(f"{field} = {sources!r}: expected a tuple of at least one source, as (Stdlib(),).")
    for source in sources:
        if isinstance(source, type) or not isinstance(source, Source):
            raise UserError(f"{field} has {source!r}, which is not a source: expected one such as Stdlib().")
