"""`TextPairs`, queries with the text that belongs to each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError
from axon.serve.chat_turns import Turns
from axon.train.contrastive import TEXTS
from axon.tune.comparisons import check_answers
from axon.tune.examples import Examples, Read
from axon.tune.formats import TEXT_PAIRS, Conversation, Format
from axon.tune.packing import Document


@dataclass(frozen=True)
class TextPairs(Examples):
    """Texts for the objective `InfoNCE`: a `query`, a `positive`, which belongs to it, and perhaps a `negative`.

    Each text is written as it is, without a chat template, with the tokenizer's end after it. Held out by the query.
    """

    formats: ClassVar[tuple[Format, ...]] = TEXT_PAIRS
    sides: ClassVar[int] = 3
    documents: ClassVar[str] = TEXTS
    answers: ClassVar[bool] = False

    packed: int = 8

    def writer(self, tokenizer: Tokenizer, report: Callable[[str], None]) -> Callable[[Conversation, str], Turns]:
        def write(text: Conversation, where: str) -> Turns:
            ids = with_end(tokenizer, tokenizer.prompt(text.messages[0]["content"]))
            return Turns(tuple(ids), (1.0,) * len(ids))

        return write

    def document(self, turns: Turns, read: Read) -> Document:
        """With the last id as an input too: an embedding may be read from it."""
        return super().document(Turns((*turns.ids, turns.ids[-1]), (*turns.weights, 1.0)), read)

    def text_of(self, document: Document) -> Document:
        return document.first(-1)

    def question_of(self, document: Document) -> np.ndarray:
        return document.ids

    def check_example(self, documents: Sequence[Document], where: str) -> None:
        query, positive, negative = (one.ids.tobytes() for one in documents)
        if positive in (query, negative):
            other = "query" if positive == query else "negative"
            raise UserError(
                f"{where}: 'positive' is the same text as {other!r}: leave the record out, or write another"
            )

    def check_objective(self, objective: Any) -> None:
        check_answers(self, objective, "examples")

    def _conversations(self) -> Iterator[tuple[Read, tuple[Conversation | None, ...]]]:
        found = super()._conversations()
        return ((read, (*texts, *[None] * (self.sides - len(texts)))) for read, texts in found)


def with_end(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids of a text, with an end after it, if the tokenizer has one."""
    if not tokenizer.ends or (len(ids) > 1 and ids[-1] in tokenizer.ends):
        return ids
    return [*ids, tokenizer.bos if tokenizer.bos in tokenizer.ends else min(tokenizer.ends)]
