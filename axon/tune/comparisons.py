"""`Comparisons`, pairs of answers to a prompt, of which one was preferred."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from axon.errors import UserError
from axon.serve.chat_turns import Turns
from axon.train.preference import ANSWERS
from axon.tune.examples import Examples, Read
from axon.tune.formats import PAIRS, Format
from axon.tune.packing import Document


@dataclass(frozen=True)
class Comparisons(Examples):
    """Pairs for the objectives `DPO`, `IPO`, `SimPO`, `ORPO`, `CPO` and `Reward`.

    A record has `chosen` and `rejected`, each a text or messages, and their `prompt`; without one they are whole chats.
    Or it has a `prompt` and `ranked`, such answers with the best first, of which each pair is an example.
    Both are in one sequence of `seq` positions, the chosen first; `packed` pairs of them at most, and no more than the
    objective's `pairs`. Of each, what the assistant writes is compared, as of `Chats`.
    """

    formats: ClassVar[tuple[Format, ...]] = PAIRS
    sides: ClassVar[int] = 2
    documents: ClassVar[str] = ANSWERS

    packed: int = 8

    def document(self, turns: Turns, read: Read) -> Document:
        """With the last id as an input too, which no target follows: a score is read from it."""
        return super().document(Turns((*turns.ids, turns.ids[-1]), (*turns.weights, 0.0)), read)

    def text_of(self, document: Document) -> Document:
        return document.first(-1)

    def check_example(self, documents: Sequence[Document], where: str) -> None:
        for side, one in zip(("chosen", "rejected"), documents, strict=True):
            if not one.learned[1:].any():
                raise UserError(f"{where}: the {side} answer is empty, or no message of it is the assistant's: add one")
        chosen, rejected = documents
        if np.array_equal(chosen.ids, rejected.ids):
            raise UserError(
                f"{where}: by the chat template the chosen and the rejected text are the same: leave it out"
            )

    def check_objective(self, objective: Any) -> None:
        check_answers(self, objective, "pairs")


def check_answers(data: Examples, objective: Any, field: str) -> None:
    """Raise `UserError` for an objective over other answers, or without room for so many: `field` is what has it."""
    name, kind = type(data).__name__, type(objective).__name__
    if objective.sides != data.sides:
        raise UserError(
            f"{kind} is for other examples than {name}: set Train.objective to one for these, as docs/tuning.md lists, "
            f"or Train.data to {'@Comparisons()' if objective.sides == 2 else '@Labelled()'}"
        )
    if objective.room < data.packed:
        raise UserError(
            f"{name}.packed is {data.packed}, and {kind}.{field} {objective.room}: set {kind}.{field} to at least "
            f"{data.packed}"
        )
