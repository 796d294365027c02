"""`LabelledTexts`, texts of which each is of one class."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from axon.data.tokenizer import Tokenizer
from axon.errors import UserError, suggest
from axon.model_config import TypedConfig
from axon.serve.chat_turns import Turns
from axon.train.text_classification import TYPES, TextClassification
from axon.tune.examples import Examples, PreparedExamples, Read
from axon.tune.formats import LABELLED_TEXTS, Conversation, Format
from axon.tune.packing import Document, Example
from axon.tune.split import Split
from axon.tune.text_pairs import with_end
from models.heads import TextClassifier, check_labels


@dataclass(frozen=True)
class TypedTurns(Turns):
    """A text's ids; `types`: of the tokens of a pair, none of a single text."""

    types: tuple[int, ...] = ()


@dataclass(frozen=True)
class LabelledTexts(Examples):
    """Texts for the objective `TextClassification`: a record has a `text`, and a `label`, one of `labels` or its place;
    and perhaps a `text_pair`, a second text, as the hypothesis beside a premise.

    Each text is written as it is, without a chat template, with the tokenizer's end after it, of whose state the class
    is the target; two are joined by the tokenizer's template, which says of which type a token is. Held out by the
    text.

    Args:
        labels: the classes, by name, as of `TextClassifier.labels`.
        end: whether an end follows each text. Without, it is as the tokenizer begins and ends a prompt, as it is for
            `transformers`.
    """

    formats: ClassVar[tuple[Format, ...]] = LABELLED_TEXTS
    answers: ClassVar[bool] = False

    labels: tuple[str, ...] = ()
    end: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_labels(self.labels, "LabelledTexts.labels")

    def prepare(self, report: Callable[[str], None] = print) -> PreparedExamples:
        """As of `Examples`; raises `UserError` for training texts that are all of one class, too."""
        prepared = super().prepare(report)
        found = Counter(self.label_of(example) for example in prepared.splits["train"].examples)
        if len(found) == 1:
            raise UserError(
                f"LabelledTexts.sources: the label of all {found.total():,} training texts is {next(iter(found))!r}; "
                "expected at least two classes: add texts of another"
            )
        found += Counter(self.label_of(example) for example in prepared.splits["held_out"].examples)
        report(f"labels: {', '.join(f'{label} {found[label]:,}' for label in self.labels)}")
        return prepared

    def writer(self, tokenizer: Tokenizer, report: Callable[[str], None]) -> Callable[[Conversation, str], Turns]:
        def write(text: Conversation, where: str) -> Turns:
            (message,) = text.messages
            if (second := message.get("text_pair")) is None:
                ids, types = tokenizer.prompt(message["content"]), []
            else:
                ids, types = _joined(tokenizer, message["content"], second, where)
            ids = with_end(tokenizer, ids) if self.end else ids
            types += types[-1:] * (len(ids) - len(types))  # that of an end, where the template has none
            return TypedTurns((*ids, self._number(message["label"], where)), (*[0.0] * len(ids), 1.0), tuple(types))

        return write

    def document(self, turns: Turns, read: Read) -> Document:
        """With the types of a pair's tokens, each in the place of the token's target."""
        document = super().document(turns, read)
        types = turns.types if isinstance(turns, TypedTurns) else ()
        return replace(document, more={TYPES: np.array([0, *types], np.int32)}) if types else document

    @property
    def more(self) -> Mapping[str, np.ndarray]:
        return {TYPES: np.zeros((), np.int32)}

    def label_of(self, example: Example) -> str:
        """The name of its class."""
        return self.labels[int(example.documents[0].ids[-1])]

    def title(self, example: Example) -> str:
        return f"{example.where}: {self.label_of(example)}"

    def text_of(self, document: Document) -> Document:
        return document.first(-1)

    def question_of(self, document: Document) -> np.ndarray:
        return document.ids[:-1]

    def check_example(self, documents: Sequence[Document], where: str) -> None:
        """Every text has a class."""

    def check_objective(self, objective: Any) -> None:
        if not isinstance(objective, TextClassification):
            raise UserError(
                f"Train.data is LabelledTexts, and Train.objective a {type(objective).__name__}: set Train.objective = "
                "@TextClassification()"
            )

    def check_model(self, model: Any, splits: Mapping[str, Split]) -> None:
        if not isinstance(model, TextClassifier):
            return
        if model.labels != self.labels:
            raise UserError(
                f"LabelledTexts.labels is {self.labels}, and TextClassifier.labels {model.labels}: set both to the same"
            )
        documents = (one for split in splits.values() for example in split.examples for one in example.documents)
        types = max((int(one.more[TYPES].max()) + 1 for one in documents if one.more), default=1)
        if isinstance(model.model, TypedConfig) and types > model.model.types:
            raise UserError(
                f"LabelledTexts.sources have pairs of texts, whose tokens are of {types} types, and "
                f"{type(model.model).__name__}.types is {model.model.types}: set it to {types}, or give a column of "
                "single texts"
            )

    def _number(self, label: Any, where: str) -> int:
        if isinstance(label, int) and 0 <= label < len(self.labels):
            return int(label)
        if label not in self.labels:
            near = suggest(str(label), self.labels)
            raise UserError(f"{where}: label is {label!r}; expected one of LabelledTexts.labels, or its number.{near}")
        return self.labels.index(label)


def _joined(tokenizer: Tokenizer, first: str, second: str, where: str) -> tuple[list[int], list[int]]:
    """Two texts as ids and types. Raises `UserError`, with the place, for a tokenizer that joins none."""
    try:
        return tokenizer.pair(first, second)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
