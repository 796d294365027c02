"""Prompts that a model answers to learn from its answers: documents of a source, or the questions of chats."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from axon.data.prepared import Question
from axon.data.sources import Source
from axon.data.tokenizer import Tokenizer
from axon.tune.examples import PreparedExamples, last_answer


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        where: it is from, for messages. text, ids: its text and its tokens. reference: the text of the right answer,
            empty where there is none. record: its columns in the source.
    """

    where: str
    text: str
    ids: tuple[int, ...]
    reference: str = ""
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)


def of_sources(sources: Sequence[Source], tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Each document."""
    for source in sources:
        for number, text in enumerate(source.texts()):
            where = f"document {number} of {source.name}"
            yield Prompt(where, text, tuple(tokenizer.prompt(text)), record={"text": text})


def of_chats(chats: PreparedExamples) -> Iterator[Prompt]:
    """All of each training example before the last of the assistant's turns, which is the right answer."""
    for example in chats.splits["train"].examples:
        yield of_question(last_answer(example), chats.tokenizer)


def of_question(question: Question, tokenizer: Tokenizer) -> Prompt:
    """A question of chats, with the text of its right answer."""
    text, reference = tokenizer.visible(question.prompt), tokenizer.visible(question.answer)
    return Prompt(question.where, text, question.prompt, reference, question.record)
