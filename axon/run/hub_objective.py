"""By which objective a model of text of the Hugging Face hub was trained."""

from typing import Any

from axon.checkpoint.huggingface.model import HubModel
from axon.checkpoint.huggingface.tokenizer import special_id
from axon.errors import UserError
from axon.train.masked import MaskedToken
from axon.train.objective import NextToken, Objective
from axon.train.preference import Reward
from axon.train.spans import SpanCorruption
from axon.train.text_classification import TextClassification


def text_objective(hub: HubModel) -> Objective:
    """The objective that suits the family's module, with the ids that the model's own tokenizer has for it."""
    return next((one for one in _candidates(hub) if _suits(one, hub.model.build())), NextToken())


def _candidates(hub: HubModel) -> tuple[Objective, ...]:
    mask = special_id(hub.folder, "[MASK]", "mask_token")
    sentinel = special_id(hub.folder, "<extra_id_0>")
    headed = TextClassification(), Reward()
    return NextToken(), *headed, MaskedToken(mask_id=mask), SpanCorruption(sentinel_id=sentinel)


def _suits(objective: Objective, module: Any) -> bool:
    try:
        objective.check(module)
    except UserError:
        return False
    return True
