"""What was trained: the folder of a run, or a model of the Hugging Face hub; to look at, or to start from."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from axon.checkpoint import Reader
from axon.checkpoint.huggingface.config import changed_fields, value_at
from axon.checkpoint.huggingface.hub import is_hub
from axon.checkpoint.huggingface.model import HubModel, open_model
from axon.checkpoint.huggingface.tokenizer import tokenizer_of
from axon.data import Data, TokenizerFile
from axon.errors import UserError
from axon.layout import Layout
from axon.run.folder import RunFolder
from axon.run.restore import restore_evaluated
from axon.run.tree import Train
from axon.runtime import Runtime
from axon.train.optimizers import AdamW, Constant

SEQ = 1024
"""Positions of a sequence in an evaluation of a model of the hub, if it has as many."""

Report = Callable[[str], None]


class Trained(Protocol):
    """A trained model; `has_text`: whether the run says on which text it is evaluated."""

    has_text: bool

    @property
    def train(self) -> Train:
        """The run that it is of; of a model of the hub, one that could go on with it."""
        ...

    @property
    def tokenizer(self) -> TokenizerFile: ...

    def restore(self, runtime: Runtime, model: Any, report: Report) -> tuple[Any, Any]:
        """Parameters and variables for a runtime of `model`."""
        ...

    def check_same_tokens(self, tokenizer: str) -> None:
        """Raise `UserError` if `tokenizer`, the text of a tokenizer.json, is not that of the model."""
        ...


def open_trained(name: str | Path) -> Trained:
    """That of a run's folder, or of `hf:DIR_OR_NAME`. Raises `UserError` if there is none."""
    return TrainedHub(open_model(str(name))) if is_hub(name) else TrainedRun(RunFolder.existing(name))


class TrainedRun:
    """The latest checkpoint of a run."""

    has_text = True

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self.train: Train = folder.tree()

    @property
    def tokenizer(self) -> TokenizerFile:
        """The one that the run was trained with, even if its sources have changed since."""
        if not self.folder.tokenizer.is_file():
            raise UserError(f"there is no file {self.folder.tokenizer}: `axon train` on this run writes it again")
        trained_with, path = self.train.data.tokenizer, str(self.folder.tokenizer)
        ours = isinstance(trained_with, TokenizerFile)
        return _fitting(replace(trained_with, path=path) if ours else TokenizerFile(path), self.train.model, "run")

    def restore(self, runtime: Runtime, model: Any, report: Report) -> tuple[Any, Any]:
        reader = Reader(self.folder.checkpoints)
        values, variables = restore_evaluated(reader, runtime, self.train.optimizer)
        report(f"parameters of step {reader.latest()}, {_on(runtime)}")
        return values, variables

    def check_same_tokens(self, tokenizer: str) -> None:
        self.folder.check_same_tokens(tokenizer)


class TrainedHub:
    """A model of the hub."""

    has_text = False

    def __init__(self, hub: HubModel):
        self.hub = hub
        self.tokenizer = _fitting(tokenizer_of(hub.folder), hub.model, "model")
        self.train = run_of(hub, self.tokenizer)

    def restore(self, runtime: Runtime, model: Any, report: Report) -> tuple[Any, Any]:
        for line in self._differences(model):
            report(line)
        values, variables = self.hub.load(runtime, model.vocab)
        report(f"parameters of {self.hub.name}, {_on(runtime)}")
        return values, variables

    def check_same_tokens(self, tokenizer: str) -> None:
        mine = self.tokenizer
        if mine.load().to_json() != tokenizer:
            fields = {"path": mine.path, "bos": mine.bos, "ends": mine.ends, "prompts": mine.prompts}
            lines = [f"TokenizerFile.{name} = {value!r}" for name, value in fields.items()]
            raise UserError(
                "\n  ".join(
                    [
                        f"{self.hub.name}: its tokenizer differs from this run's, so its embeddings would be of other "
                        "tokens. Set",
                        "Data.tokenizer = @TokenizerFile()",
                        *lines,
                    ]
                )
            )

    def _differences(self, model: Any) -> list[str]:
        """What a person should know of how the model differs from what its config.json says."""
        unknown = self.hub.ignored()
        lines = [f"config.json: fields that Axon does not read: {', '.join(unknown)}"] if unknown else []
        if type(model) is not type(self.hub.model):
            kinds = type(self.hub.model).__name__, type(model).__name__
            raise UserError(
                f"{self.hub.name} is a {kinds[0]}, and Train.model is a {kinds[1]}: set it to @{kinds[0]}()"
            )
        changed = changed_fields(self.hub.table, self.hub.config, model)
        kind, theirs = type(model).__name__, self.hub.model
        return lines + [
            f"{kind}.{name} is {value_at(model, name)!r}, and {value_at(theirs, name)!r} in {self.hub.name}"
            for name in changed
        ]


def run_of(hub: HubModel, tokenizer: TokenizerFile, folder: str | None = None) -> Train:
    """A run that could go on with a model of the hub: each device has a part of every weight (ZeRO-3)."""
    longest = hub.config.get("max_position_embeddings") or hub.config.get("n_positions") or SEQ
    return Train(
        model=hub.model,
        data=Data(seq=min(longest, SEQ), batch=8, tokenizer=tokenizer),
        optimizer=AdamW(Constant(1e-5)),
        steps=1000,
        layout=Layout(mesh={"data": -1}, zero=3),
        run_dir=folder,
    )


def _fitting(file: TokenizerFile, model: Any, of: str) -> TokenizerFile:
    if (ids := file.load().vocab) > model.vocab:
        raise UserError(f"{file.path} has {ids} ids, and the run's model {model.vocab}: it belongs to another {of}")
    return file


def _on(runtime: Runtime) -> str:
    count = runtime.placement.mesh.size
    return f"on {count} device{'s' if count > 1 else ''}"
