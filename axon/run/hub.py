"""What a config takes of a trained model instead of typing it out: its own config, and its tokenizer."""

from dataclasses import replace

from axon.checkpoint.huggingface.hub import is_hub
from axon.checkpoint.huggingface.tokenizer import FILE
from axon.data import TokenizerFile
from axon.disk import location
from axon.fields import Location
from axon.run.trained import Trained, open_trained
from axon.run.tree import Model


def Hub(source: Location) -> Model:
    """The config of a trained model: of `hf:DIR_OR_NAME` as its config.json says it, or that of a run.

    The family's own config takes its place in a run's folder, which needs the source no more. In a file, bindings of
    the family override fields of it: `Llama.vocab_multiple = 128`; in Python, `dataclasses.replace`.
    """
    return _opened(source, "Hub.source").train.model


def HubTokenizer(source: Location) -> TokenizerFile:
    """The tokenizer of a trained model, with what opens its documents and ends its answers; beside its file is the
    chat template, if the model has one."""
    trained = _opened(source, "HubTokenizer.source")
    found, beside = trained.tokenizer, trained.companions
    return replace(found, path=str(beside / FILE)) if beside and (beside / FILE).is_file() else found


def _opened(source: str, where: str) -> Trained:
    return open_trained(source if is_hub(source) else location(source, where))
