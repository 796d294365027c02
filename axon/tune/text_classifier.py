"""A language model that tells which class a text is of."""

from dataclasses import dataclass
from typing import Any

from axon.errors import UserError
from axon.nn import Param
from axon.nn.param import normal
from axon.tune.with_head import WithHead


def check_labels(labels: tuple[str, ...], field: str) -> None:
    """Raise `UserError` for fewer than two classes, and for two of one name."""
    if len(set(labels)) != len(labels) or len(labels) < 2:
        raise UserError(f"{field} is {labels}; expected two names or more, each once, as ('negative', 'positive')")


@dataclass(frozen=True)
class TextClassifier(WithHead):
    """`model`, and `classifier`, `embed classes`, which makes a logit of each class of the last hidden state; for the
    objective `TextClassification`.

    A run that starts from a language model takes all but that: `InitFrom.paths = ('*', '!classifier')`.

    Args:
        labels: the classes, by name, as of `LabelledTexts.labels`.
    """

    labels: tuple[str, ...] = ()

    def __post_init__(self):
        check_labels(self.labels, "TextClassifier.labels")

    def build(self) -> Any:
        module = self.model.build()
        dims = {**module.dims, "classes": len(self.labels)}
        module.classifier = Param("embed classes", dims, normal(dims["embed"] ** -0.5))
        module.on_top, module.predicts_tokens = ("classifier",), False
        return module
