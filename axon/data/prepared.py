"""The data of a run once they are prepared, be it text or images."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from axon.data.feed import ALL, Batch, Feed, FeedContext, SequenceNumbers
from axon.data.tokenizer import Tokenizer
from axon.train.references import References


class BatchReader(Iterator[Batch], AbstractContextManager[Any], Protocol):
    """Batches read ahead; the end of the context stops that."""


@dataclass(frozen=True)
class Question:
    """The ids of a prompt, and those of the right answer, its end included; where they are from, and the columns
    there."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    where: str = ""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)


Rewards = Callable[[Sequence[Question], Sequence[Any]], Mapping[str, np.ndarray]]
"""What rewards say of what follows questions, for each an `axon.tune.episodes.Episode`: their sum under `reward`, and
each; NaN where one failed. Empty where nothing is learned from rewards."""


class NoRewards:
    """The base of data that learns from no rewards."""

    def runner(self, report: Callable[[str], None] = print) -> Any:
        return None

    def rewards(self, references: References, report: Callable[[str], None] = print) -> Rewards:
        return lambda questions, episodes: {}


class NoChats(NoRewards):
    """The base of data that are no chats: without questions, and written by no template."""

    def questions(self, count: int) -> Sequence[Question]:
        return ()

    @property
    def companions(self) -> Path | None:
        return None

    @property
    def remarked(self) -> Mapping[str, Sequence[str]]:
        return {}


class Prepared(Protocol):
    """Batches of two splits, in an order that a seed gives, and where each is from: `Corpus`, `Gallery`, or a corpus
    beside a feed of another kind."""

    @property
    def arrays(self) -> Mapping[str, str]:
        """Name → axes of the arrays of a training batch."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the text; None if it has none."""
        ...

    def check_fits(self, model: Any, objective: Any, seq: int) -> None:
        """Raise `UserError` unless `model` and `objective` take these batches, of `seq` positions."""
        ...

    def feed(self, context: FeedContext) -> Feed:
        """Training batches, without end. Batch k depends on the seed and k alone, unless the feed sees the state."""
        ...

    def held_out(self, batches: int | None = None, sequences: SequenceNumbers = ALL) -> BatchReader:
        """The first `batches` (None: all) of the held-out split, in a fixed order; the last is padded with weight 0."""
        ...

    def questions(self, count: int) -> Sequence[Question]:
        """The first `count` held-out questions that have a right answer, always the same; none where there are none."""
        ...

    def runner(self, report: Callable[[str], None] = print) -> Any:
        """The `axon.tune.episode_runner.EpisodeRunner` of an environment that speaks between several answers to a
        question; None where an answer is all."""
        ...

    def rewards(self, references: References, report: Callable[[str], None] = print) -> Rewards:
        """What says how good episodes are that follow questions. references: the run's frozen models."""
        ...

    @property
    def companions(self) -> Path | None:
        """The folder of what came with the tokenizer, as the chat template that the texts are written by; None without
        one."""
        ...

    @property
    def remarked(self) -> Mapping[str, Sequence[str]]:
        """Remarks on some examples, as that they are dropped, and where each of these is."""
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
