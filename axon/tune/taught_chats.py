"""`TaughtChats`, chats with a teacher's most likely next tokens beside them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from axon.checks import check_range
from axon.data.records import Record
from axon.errors import UserError
from axon.model_config import vocab_of
from axon.serve.chat_turns import Turns
from axon.train.distillation import TEACHER_IDS, TEACHER_LOGPROBS, TopDistillation
from axon.tune.chats import Chats
from axon.tune.examples import PreparedExamples, Read
from axon.tune.formats import CHATS, Format
from axon.tune.packing import Document
from axon.tune.split import Split

SLACK = 1e-3
"""By how much probabilities may come to more than 1."""


@dataclass(frozen=True)
class TaughtChats(Chats):
    """Conversations for the objective `TopDistillation`: a record is as of `Chats`, and has two columns more, lists
    with a row for each token that is learned of the text, in order: `teacher_ids`, the `top` most likely ids of a
    teacher in that token's place, and `teacher_logprobs`, their log-probabilities in nats at temperature 1.

    `axon tune CONFIG --teacher RUN --top K --out FILE` writes such records.

    Args:
        top: ids in a row, as of `TopDistillation`.
    """

    formats: ClassVar[tuple[Format, ...]] = tuple(
        replace(one, columns=(*one.columns, TEACHER_IDS, TEACHER_LOGPROBS)) for one in CHATS
    )

    top: int = 32

    def __post_init__(self):
        super().__post_init__()
        check_range(self, "[1, 2**16]", "top")

    def prepare(self, report: Callable[[str], None] = print) -> PreparedExamples:
        """As of `Chats`; reports how often the teacher names the text's own token, hardly ever where it has another
        vocabulary."""
        prepared = super().prepare(report)
        documents = [one for split in prepared.splits.values() for example in split.examples for one in example.own]
        learned = sum(int(one.learned[1:].sum()) for one in documents)
        named = sum(int(np.sum((one.more[TEACHER_IDS] == one.ids[:, None])[one.learned])) for one in documents)
        report(f"teacher: {named / learned:.1%} of the tokens that are learned are among its {self.top} most likely")
        return prepared

    def document(self, turns: Turns, read: Read) -> Document:
        document = super().document(turns, read)
        places = 1 + np.flatnonzero(document.learned[1:])
        ids, logprobs = (self._rows(read, column, len(places)) for column in (TEACHER_IDS, TEACHER_LOGPROBS))
        _check_distributions(ids, logprobs, read.where)
        rows = {TEACHER_IDS: ids, TEACHER_LOGPROBS: logprobs}
        return replace(document, more={name: self._placed(name, places, of, document) for name, of in rows.items()})

    @property
    def more(self) -> Mapping[str, np.ndarray]:
        return {TEACHER_IDS: np.zeros(self.top, np.int32), TEACHER_LOGPROBS: np.zeros(self.top, np.float32)}

    def check_model(self, model: Any, splits: Mapping[str, Split]) -> None:
        examples = (example for split in splits.values() for example in split.examples)
        most, where = max((int(one.documents[0].more[TEACHER_IDS].max()), one.where) for one in examples)
        if (vocab := vocab_of(model)) is not None and most >= vocab:
            raise UserError(
                f"{where}: {TEACHER_IDS} has the id {most}, and Train.model a vocab of {vocab}: the teacher has "
                "another vocabulary. Its ids must be the model's own"
            )

    def check_objective(self, objective: Any) -> None:
        if not isinstance(objective, TopDistillation):
            raise UserError(
                f"Train.data is TaughtChats, and Train.objective a {type(objective).__name__}: set Train.objective = "
                "@TopDistillation(), or Train.data = @Chats()"
            )
        if objective.top != self.top:
            raise UserError(
                f"TaughtChats.top is {self.top}, and TopDistillation.top {objective.top}: set both to the same"
            )

    def _rows(self, read: Read, column: str, count: int) -> np.ndarray:
        """A column as `count top`. Raises `UserError` for another shape."""
        name = self.names.column(column)
        rows = read.record[name]
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise UserError(f"{read.where}: column {name!r} has {rows!r:.80}; expected a list of lists of numbers")
        if len(rows) != count:
            raise UserError(
                f"{read.where}: column {name!r} has {len(rows)} rows, and {count} tokens are learned of the text: a "
                "file is for one tokenizer, chat template and choice of what is learned. Make it anew by `axon tune "
                "CONFIG --teacher RUN --out FILE`"
            )
        if other := next((row for row in rows if len(row) != self.top), None):
            raise UserError(
                f"{read.where}: column {name!r} has a row of {len(other)}, and TaughtChats.top is {self.top}: set it "
                f"and TopDistillation.top to {len(other)}, or leave out the rest of each row"
            )
        try:
            return np.array(rows, np.int32 if column == TEACHER_IDS else np.float32).reshape(count, self.top)
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{read.where}: column {name!r}: {error}; expected lists of numbers") from None

    def _placed(self, name: str, places: np.ndarray, rows: np.ndarray, document: Document) -> np.ndarray:
        placed = np.tile(self.more[name], (len(document.ids), 1))
        placed[places] = rows
        return placed


def _check_distributions(ids: np.ndarray, logprobs: np.ndarray, where: str) -> None:
    """Raise `UserError` for an id below 0 or twice in a row, and for what are no log-probabilities."""
    ordered = np.sort(ids, axis=1)
    if ids.min() < 0:
        raise UserError(f"{where}: {TEACHER_IDS} has the id {ids.min()}; expected ids of the model's vocabulary")
    if np.any(twice := ordered[:, 1:] == ordered[:, :-1]):
        raise UserError(f"{where}: a row of {TEACHER_IDS} has {ordered[:, 1:][twice][0]} twice; expected different ids")
    totals = np.exp(np.minimum(logprobs, 1)).sum(axis=1)
    if not np.all(np.isfinite(logprobs)) or np.any(totals > 1 + SLACK):
        raise UserError(
            f"{where}: the probabilities of a row of {TEACHER_LOGPROBS} come to {totals.max():.3g}; expected at most "
            "1, of finite natural logarithms of a softmax, not logits"
        )


def taught(record: Record, ids: np.ndarray, logprobs: np.ndarray) -> Record:
    """A record of `Chats` as one of these; `ids` and `logprobs`: `tokens top`, of the tokens that are learned."""
    rounded = [[float(f"{value:.6g}") for value in row] for row in logprobs.tolist()]
    return {**record, TEACHER_IDS: ids.tolist(), TEACHER_LOGPROBS: rounded}
