"""`Labelled`, single answers to a prompt, each desirable or not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from axon.errors import UserError
from axon.train.preference import ANSWERS
from axon.tune.comparisons import check_answers
from axon.tune.examples import Examples, Read
from axon.tune.formats import LABELLED, Conversation, Format, read_example
from axon.tune.packing import EMPTY, Document, Example
from axon.tune.split import adapter_of


@dataclass(frozen=True)
class Labelled(Examples):
    """Answers with a binary label, for the objective `KTO`.

    A record has a `prompt`, a `completion`, each a text or messages, and a `label`, true where the answer is desirable;
    or `messages`, the last of which is the answer, and a `label`. Beside each answer in its sequence is that of the
    next record with another prompt, as an answer to this one's: of such the divergence is estimated, whatever the
    batch; with `adapters`, of the records that train the same one. `packed` examples in a sequence at most, and no more
    than the objective's `examples`.
    """

    formats: ClassVar[tuple[Format, ...]] = LABELLED
    sides: ClassVar[int] = 3
    documents: ClassVar[str] = ANSWERS

    packed: int = 8

    def check_example(self, documents: Sequence[Document], where: str) -> None:
        if not all(one.learned[1:].any() for one in documents if one is not EMPTY):
            raise UserError(
                f"{where}: its completion, or that of the next record, is empty or not the assistant's: write it, or "
                "leave the record out"
            )

    def key_of(self, example: Example) -> bytes:
        return super().key_of(replace(example, documents=example.documents[:2]))  # without the other prompt's answer

    def check_objective(self, objective: Any) -> None:
        check_answers(self, objective, "examples")

    def _conversations(self) -> Iterator[tuple[Read, tuple[Conversation | None, ...]]]:
        records = list(self.records())
        read = [read_example(one.record, one.where, self.formats, self.names) for one in records]
        labels = [bool(one.record[self.names.column("label")]) for one in records]
        others = self._others(records, [prompt for prompt, _ in read], labels)
        for number, (one, (prompt, answer), label) in enumerate(zip(records, read, labels, strict=True)):
            own = _answered(prompt, answer)
            sides = (own, None) if label else (None, own)
            yield one, (*sides, _answered(prompt, read[others[number]][1]))

    def _others(
        self, records: Sequence[Read], prompts: Sequence[Conversation], labels: Sequence[bool]
    ) -> dict[int, int]:
        """Of each record, by number, the next with another prompt, of those that train the same adapter."""
        adapters, others = [adapter_of(self, one.source) for one in records], {}
        for adapter in dict.fromkeys(adapters):
            own = [number for number, one in enumerate(adapters) if one == adapter]
            whose = f" of adapter {adapter!r}" if adapter else ""
            self._check([labels[number] for number in own], {str(prompts[number]) for number in own}, whose)
            following = with_another_prompt([prompts[number] for number in own])
            others |= {number: own[other] for number, other in zip(own, following, strict=True)}
        return others

    def _check(self, labels: Sequence[bool], prompts: set[str], whose: str) -> None:
        if len({*labels}) == 1:
            raise UserError(
                f"Labelled.sources: the label of all {len(labels):,} records{whose} is {labels[0]}; expected desirable "
                "answers (true) and others (false). Add such, or learn from desirable ones alone: Train.data = @Chats()"
            )
        if len(prompts) == 1:
            raise UserError(
                f"Labelled.sources: all {len(labels):,} records{whose} have the same prompt; expected at least two, as "
                "the divergence is estimated from answers to another prompt. Add records with another"
            )


def with_another_prompt(prompts: Sequence[Conversation]) -> list[int]:
    """For each prompt, of which there are two or more, the number of the next that differs; after the last is the
    first."""
    count = len(prompts)
    following = [0] * (2 * count)
    for at in reversed(range(2 * count - 1)):
        same = prompts[at % count] == prompts[(at + 1) % count]
        following[at] = following[at + 1] if same else (at + 1) % count
    return following[:count]


def _answered(prompt: Conversation, answer: Conversation) -> Conversation:
    return Conversation((*prompt.messages, *answer.messages), prompt.tools)
