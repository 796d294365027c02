"""Models of text with a head of another kind: classes of texts, and scores. Their config is around a family's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from axon.errors import UserError
from axon.foreign_json import NULL, OBJECT, integer, one_of, read_field, shown
from axon.model_config import vocab_of
from axon.nn import LanguageModel, Param
from axon.nn.hugging_face import INSIDE, Architecture, Converted, HeadTable, Ignored, Row, inside
from axon.nn.param import normal
from models.bert import FIELDS, Bert, BertClassifier, encoder_rows, linear_rows

__all__ = ["HUGGING_FACE", "HUGGING_FACE_HEADS", "RewardModel", "TextClassifier", "WithHead", "check_labels"]


@dataclass(frozen=True)
class WithHead:
    """`model`, a language model's config; subclasses add parameters to what it builds."""

    model: Any

    @property
    def vocab(self) -> int:
        """See `axon.model_config.TextConfig`."""
        vocab = vocab_of(self.model)
        assert vocab is not None
        return vocab

    def without_tokens(self, on_top: str, axes: str, sizes: Mapping[str, int]) -> Any:
        """The module with a parameter `on_top` in the place of its own head, which it has no more."""
        module = self.model.build()
        if not isinstance(module, LanguageModel):
            raise UserError(
                f"{type(self).__name__}.model is a {type(self.model).__name__}; expected a language model, as Llama; "
                "of a TextClassifier also Bert"
            )
        dims = {**module.dims, **sizes}
        if not module.tied:
            del module.head
        setattr(module, on_top, Param(axes, dims, normal(dims["embed"] ** -0.5)))
        module.tied, module.predicts_tokens = True, False
        module.on_top, module.replaced = (on_top,), ("head",)
        return module


def check_labels(labels: tuple[str, ...], field: str) -> None:
    """Raise `UserError` for fewer than two classes, and for two of one name."""
    if len(set(labels)) != len(labels) or len(labels) < 2:
        raise UserError(f"{field} is {labels}; expected two names or more, each once, as ('negative', 'positive')")


@dataclass(frozen=True)
class TextClassifier(WithHead):
    """`model`, and `classifier`, `embed classes`, which makes a logit of each class of the last hidden state; for the
    objective `TextClassification`. Of `Bert` it is over a `Pooler`, and with `classifier_bias`.

    A run that starts from a model without it takes all but that: `InitFrom.paths = ('*', '!classifier*')`.

    Args:
        model: a language model's config, or a `Bert`, whose own head is left out.
        labels: the classes, by name, as of `LabelledTexts.labels`.
    """

    labels: tuple[str, ...] = ()

    def __post_init__(self):
        check_labels(self.labels, "TextClassifier.labels")

    def build(self) -> Any:
        if isinstance(self.model, Bert):
            return BertClassifier(self.model, len(self.labels))
        return self.without_tokens("classifier", "embed classes", {"classes": len(self.labels)})


@dataclass(frozen=True)
class RewardModel(WithHead):
    """`model`, and `score`, `embed`, which makes a number of the last hidden state; for the objective `Reward`.

    A run that starts from a language model takes all but that: `InitFrom.paths = ('*', '!score')`.
    """

    def build(self) -> Any:
        return self.without_tokens("score", "embed", {})


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes of a config.json, as `transformers` reads them: LABEL_0 and so on where it has none, or
    another number of them than it says; 2 where it says nothing. Raises `UserError` for names that are not counted."""
    said = {name: read_field("config.json", config, name, kind, None) for name, kind in LABELS.items()}
    named = said["id2label"] or {}
    count = said["num_labels"] or len(named) or 2
    if len(named) != count:
        return tuple(f"LABEL_{number}" for number in range(count))
    labels = [named.get(str(number)) for number in range(count)]
    if not all(isinstance(label, str) for label in labels):
        raise UserError(f'id2label is {shown(named)}; expected a name of each class, as {{"0": "bad", "1": "good"}}')
    return tuple(map(str, labels))


def _named(labels: tuple[str, ...]) -> dict[str, Any]:
    numbers = {label: number for number, label in enumerate(labels)}
    return {
        "num_labels": len(labels),
        "id2label": {str(at): label for label, at in numbers.items()},
        "label2id": numbers,
    }


LABELS = {"num_labels": integer("[1, 2**20]") | NULL, "id2label": OBJECT | NULL, "label2id": OBJECT | NULL}
CLASSIFICATION = "single_label_classification"
CLASSES = Converted(
    lambda config: {"labels": _labels(config)},
    lambda model: _named(model.labels) | {"problem_type": CLASSIFICATION},
    LABELS | {"problem_type": one_of(None, CLASSIFICATION)},
)
SUFFIX = "ForSequenceClassification"
NAMES = {"Gemma3ForCausalLM": f"Gemma3Text{SUFFIX}", "GPT2LMHeadModel": f"GPT2{SUFFIX}"}
HUGGING_FACE_HEADS = (
    HeadTable(
        SUFFIX,
        TextClassifier,
        (Row("score.weight", "classifier", "classes embed"),),
        CLASSES,
        lambda config: len(_labels(config)) > 1,
        NAMES,
    ),
    HeadTable(
        SUFFIX,
        RewardModel,
        (Row("score.weight", "score", "1 embed"),),
        Converted(
            lambda config: {},
            lambda model: _named(("LABEL_0",)),
            LABELS | {"problem_type": one_of(None, "regression", CLASSIFICATION)},
        ),
        lambda config: len(_labels(config)) == 1,
        NAMES,
    ),
)
HUGGING_FACE = (
    Architecture(
        f"Bert{SUFFIX}",
        "bert",
        TextClassifier,
        encoder_rows("bert.") + linear_rows("classifier", "classifier", "classes embed", "classes"),
        (*inside(FIELDS), Ignored("tie_word_embeddings"), CLASSES),
        copies=(),
        unused=("*.position_ids",),
        within={INSIDE: Bert},
    ),
)
