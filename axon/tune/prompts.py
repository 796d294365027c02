"""Prompts that a model answers to learn from its answers: documents of a source, or the questions of chats."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from axon.data.batches import shuffled_order
from axon.data.prepared import Question
from axon.data.sources import Source
from axon.data.tokenizer import Tokenizer
from axon.tune.examples import PreparedExamples, last_answer
from axon.tune.prompt import Prompt


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


@dataclass(frozen=True)
class PromptOrder:
    """Which of some prompts each batch is of: `count`, shuffled by the seed."""

    prompts: Sequence[Prompt] = field(repr=False)
    count: int
    seed: int

    def batch(self, number: int) -> list[Prompt]:
        """The prompts of batch `number`."""
        return [self.prompts[one] for one in self._numbers(number)]

    def further(self, number: int) -> Iterator[Prompt]:
        """The prompts that are not of batch `number`, in an order of its own."""
        others = np.setdiff1d(np.arange(len(self.prompts)), self._numbers(number))
        yield from (self.prompts[one] for one in np.random.default_rng((self.seed, number)).permutation(others))

    def _numbers(self, number: int) -> np.ndarray:
        return np.asarray(shuffled_order(len(self.prompts), self.count, self.seed)[number])
