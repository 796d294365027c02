"""What was trained: the folder of a run, or a model of the Hugging Face hub; to look at, or to start from."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from axon.checkpoint import CheckpointError, Reader
from axon.checkpoint.huggingface.config import LOCAL, changed_fields
from axon.checkpoint.huggingface.hub import is_hub
from axon.checkpoint.huggingface.load import as_read
from axon.checkpoint.huggingface.model import HubModel, open_model
from axon.checkpoint.huggingface.tokenizer import tokenizer_of
from axon.checkpoint.verify import content_digest
from axon.data import Data, Images, Letters, TokenizerFile
from axon.data.records import fingerprint
from axon.errors import UserError
from axon.fields import changed, leaves
from axon.layout import Layout
from axon.model_config import ImageConfig, MultiTokenConfig, PaddedConfig, PoolerConfig, vocab_of
from axon.nn import parameters
from axon.nn.adapter_set import stored_factor
from axon.run.folder import RunFolder
from axon.run.hub_objective import text_objective
from axon.run.restore import check_finite, restore_evaluated
from axon.run.tree import Train
from axon.runtime import Runtime, flattened, nested
from axon.train.classification import Classification
from axon.train.objective import Objective
from axon.train.optimizers import AdamW, Averaging, Constant
from axon.tune.examples import Examples

SEQ = 1024
"""Positions of a sequence in an evaluation of a model of the hub, if it has as many."""

PARAMETERS, VARIABLES = "parameters", "variables"
"""The parts of a saved state: a run is begun with the first."""

Report = Callable[[str], None]
Each = Callable[[str, Any], Any]


def open_trained(name: str | Path) -> "Trained":
    """The trained model of a run's folder, or of `hf:DIR_OR_NAME`. Raises `UserError` if there is none."""
    return TrainedHub(open_model(str(name))) if is_hub(name) else TrainedRun(name)


class TrainedRun:
    """The latest checkpoint of a run, which has the folder `name`, or of one adapter of those that it trains at once:
    `RUN:ADAPTER` is used as the run that trains it alone. `whole`: whether the run is meant with all of its adapters.

    `has_text`: whether the run says on which text it is evaluated. `always_cast`: whether its arrays may be of another
    dtype than this model's. `train`: the run itself. `remarks`: what a person should know of how it is read.
    """

    has_text, always_cast = True, False
    remarks: tuple[str, ...] = ()

    def __init__(self, name: str | Path, *, whole: bool = False):
        path, self.adapter = run_and_adapter(str(name))
        self.folder = RunFolder.existing(path)
        self.train: Train = self.folder.tree()
        if not whole and (self.adapter or self.train.adapters):
            self.train = _of_adapter(self.train, path, self.adapter, self.tokenizer)

    @property
    def trained_length(self) -> int:
        """Positions of the longest sequences that it was trained on; None for a model of the hub that does not say."""
        return self.train.seq

    @property
    def tokenizer(self) -> TokenizerFile:
        """The one that the run was trained with, even if its sources have changed since."""
        data = _text_data(self.train, self.folder.path)
        if not self.folder.tokenizer.is_file():
            raise UserError(f"there is no file {self.folder.tokenizer}: `axon train` on this run writes it again")
        path = str(self.folder.tokenizer)
        if isinstance(data.tokenizer, TokenizerFile):
            return replace(data.tokenizer, path=path)
        return _fitting(TokenizerFile(path), self.train.model)

    @property
    def companions(self) -> Path | None:
        """The folder of what came with its weights: chat template, defaults of generation, pooling; None if nothing."""
        return self.folder.companions if self.folder.companions.is_dir() else None

    def restore(self, runtime: Runtime, model: Any, report: Report, each: Each = as_read) -> tuple[Any, Any]:
        """Parameters and variables for a runtime of `model`; or of each parameter what `each(path, array)` makes of it,
        which of a model of the hub it does before the next is read."""
        reader = self.reader()
        values, variables = self._evaluated(reader, runtime)
        report(f"parameters of step {reader.latest()}, {_on(runtime)}")
        flat = flattened(values)
        del values  # so that an array of which `each` makes others goes as soon as they are there
        return nested({path: each(path, flat.pop(path)) for path in tuple(flat)}), variables

    def changed(self, model: Any, whole: bool) -> dict[str, str]:
        """Fields of `model`, which takes the `whole` of it, that differ from its own and change what its weights
        compute → what they are here and there. Raises `UserError` for a model that cannot be it."""
        theirs = self.train.model
        if not whole or type(model) is not type(theirs):
            return {}
        differing = _differing(model, theirs, str(self.folder.path))
        return {path: text for path, text in differing.items() if path not in LOCAL}

    def offered(self, model: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """A run's parameters by path, their vocabulary padded as that of `model`."""
        if not self.train.weight_transforms:
            return self.reader().offered(PARAMETERS)
        declared = parameters(self.train.model.build())
        return {path: jax.ShapeDtypeStruct(one.shape, one.dtype) for path, one in declared.items()}

    def read(self, runtime: Runtime, taken: Mapping[str, str]) -> dict[str, Any]:
        """The runtime's parameters by path; `taken`: their paths → those of them in what is `offered`."""
        reader = self.reader()
        if isinstance(self.train.optimizer, Averaging) or self.train.weight_transforms:
            return self._converted(reader, runtime, taken)
        abstract = runtime.abstract({path: runtime.declared[path] for path in taken})
        found = reader.restore_arrays(PARAMETERS, {taken[path]: leaf for path, leaf in abstract.items()})
        values = {path: found[theirs] for path, theirs in taken.items()}
        check_finite(reader, runtime, nested(values))
        return values

    def reader(self) -> Reader:
        """Of its checkpoints. Raises `CheckpointError` if they are in a local folder that is not here."""
        reader, local = self.folder.reader(self.train.checkpoints), self.train.checkpoints.local_folder
        if local is not None and reader.latest() is None:
            raise CheckpointError(
                f"no checkpoint in {self.folder.checkpoints}, and none of this run in its Checkpoints.local_folder, "
                f"{local!r}, on this machine: train until step {self.train.checkpoints.every}, or run this where the "
                "local folder is"
            )
        return reader

    def _evaluated(self, reader: Reader, runtime: Runtime) -> tuple[Any, Any]:
        """Parameters to evaluate, of a runtime of the run's model: those of a run with transforms are merged."""
        if not self.train.weight_transforms:
            return restore_evaluated(reader, runtime, self.train.optimizer)
        own, values, variables = self.unmerged(runtime)
        merged = own.merged(flattened(values))
        cast = {path: value.astype(runtime.parameters[path].dtype) for path, value in merged.items()}
        return nested(cast), variables

    def unmerged(self, runtime: Runtime) -> tuple[Runtime, Any, Any]:
        """A runtime on the same mesh with the run's transforms, and its parameters to evaluate, and variables."""
        own = Runtime(
            self.train.model,
            runtime.layout,
            execution=runtime.execution,
            placement=runtime.placement,
            transforms=self.train.weight_transforms,
        )
        if not self.adapter:
            return own, *restore_evaluated(self.reader(), own, self.train.optimizer)
        values = nested(self.read_stored(own.abstract(own.parameters)))
        check_finite(self.reader(), own, values)
        variables = self.reader().restore_arrays(VARIABLES, own.abstract(own.variables)) if own.variables else {}
        return own, values, nested(variables)

    def read_stored(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Some of the parameters of the run's model with its transforms, by path, as the checkpoint has them."""
        stored = {path: self._stored(path) for path in abstract}
        found = self.reader().restore_arrays(PARAMETERS, {stored[path]: leaf for path, leaf in abstract.items()})
        return {path: found[stored[path]] for path in abstract}

    def _stored(self, path: str) -> str:
        """Where the checkpoint has a parameter, of an adapter's run the factors of this one."""
        is_factor = path.endswith(("/a", "/b"))
        return stored_factor(path, self.adapter) if self.adapter and is_factor else path

    def _converted(self, reader: Reader, runtime: Runtime, taken: Mapping[str, str]) -> dict[str, Any]:
        """`read` where the parameters to evaluate follow from all of the state: it is restored on this layout first."""
        whole = Runtime(self.train.model, runtime.layout, execution=runtime.execution, placement=runtime.placement)
        found = flattened(self._evaluated(reader, whole)[0])
        abstract = runtime.abstract({path: runtime.declared[path] for path in taken})
        cast = {path: found[theirs].astype(abstract[path].dtype) for path, theirs in taken.items()}
        return jax.device_put(cast, {path: leaf.sharding for path, leaf in abstract.items()})

    def check_same_tokens(self, tokenizer: str) -> None:
        """Raise `UserError` if `tokenizer`, the text of a tokenizer.json, is not that of the model."""
        self.folder.check_same_tokens(tokenizer)

    def digest(self) -> str:
        """Stands for its parameters, as far as that is known without reading them."""
        reader = self.reader()
        return f"step {reader.latest()}, {content_digest(reader.folder())}"


def run_and_adapter(name: str) -> tuple[str, str]:
    """`RUN:ADAPTER` as both; without an adapter, as of a folder that is there by this name, '' in its place."""
    run, _, adapter = name.rpartition(":")
    return (run, adapter) if run and "/" not in adapter and not Path(name).exists() else (name, "")


def _of_adapter(train: Train, run: str, adapter: str, tokenizer: TokenizerFile) -> Train:
    """The run of one adapter of `run`, with its tokenizer. Raises `UserError` unless this names one that it has."""
    if not train.adapters:
        raise UserError(f"{run} does not train several adapters at once (LoRA.adapters): name it {run}")
    if adapter not in train.adapters:
        what = f"no adapter {adapter!r}, and" if adapter else "not one model:"
        names = ", ".join(f"{run}:{name}" for name in train.adapters)
        raise UserError(f"{run} has {what} several that it trains at once: name one, {names}")
    alone = train.of_adapter(adapter)
    return replace(alone, data=replace(alone.data, tokenizer=tokenizer)) if isinstance(alone.data, Examples) else alone


def _differing(model: Any, theirs: Any, source: str) -> dict[str, str]:
    """Each field of `model` that is another in the config of the same class in `source` → what they are here and
    there."""
    kind = type(model).__name__
    return {
        path: f"{kind}.{path} is {now}, and {there} in {source}"
        for path, there, now in changed(leaves(theirs), leaves(model))
    }


class TrainedHub:
    """A model of the hub, used as a `TrainedRun` is; `train`: a run that could go on with it."""

    has_text, always_cast = False, True

    def __init__(self, hub: HubModel):
        self.hub, self.remarks = hub, hub.remarks
        self.train = run_of(hub)

    @property
    def trained_length(self) -> int | None:
        return _longest(self.hub)

    @property
    def tokenizer(self) -> TokenizerFile:
        _text_data(self.train, self.hub.name)
        return tokenizer_of(self.hub.folder)

    @property
    def companions(self) -> Path:
        return self.hub.folder

    def restore(self, runtime: Runtime, model: Any, report: Report, each: Each = as_read) -> tuple[Any, Any]:
        for line in self.remarks:
            report(line)
        values, variables = self.hub.load(runtime, vocab_of(model), each)
        report(f"parameters of {self.hub.name}, {_on(runtime)}")
        return values, variables

    def changed(self, model: Any, whole: bool) -> dict[str, str]:
        if type(model) is not type(self.hub.model):
            if not whole:
                return {}
            kinds = type(self.hub.model).__name__, type(model).__name__
            raise UserError(
                f"{self.hub.name} is a {kinds[0]}, and Train.model is a {kinds[1]}: set it to @{kinds[0]}(), or take "
                "what they share by Train.init_from = @InitFrom() with InitFrom.paths and InitFrom.rename"
            )
        fields = changed_fields(self.hub.table, self.hub.model, model)
        differing = _differing(model, self.hub.model, self.hub.name)
        is_of = {path: any(f"{path}.".startswith(f"{field}.") for field in fields) for path in differing}
        return {path: text for path, text in differing.items() if is_of[path]}

    def offered(self, model: Any) -> dict[str, jax.ShapeDtypeStruct]:
        mine, vocab = self.hub.with_mtp, vocab_of(self.hub.model)
        multiple = model.vocab_multiple if isinstance(model, PaddedConfig) and model.vocab == vocab else 1
        fields: dict[str, Any] = {"vocab_multiple": multiple} if isinstance(mine, PaddedConfig) else {}
        if isinstance(mine, PoolerConfig) and isinstance(model, PoolerConfig):
            fields["pooler"] = mine.pooler and model.pooler
        if isinstance(mine, MultiTokenConfig) and isinstance(model, MultiTokenConfig):
            fields["multi_token"] = mine.multi_token and model.multi_token
        module = replace(self.hub.model, **fields).build()
        self.hub.pieces(module, vocab)  # compares its files with it
        return {path: jax.ShapeDtypeStruct(one.shape, one.dtype) for path, one in parameters(module).items()}

    def read(self, runtime: Runtime, taken: Mapping[str, str]) -> dict[str, Any]:
        abstract = runtime.abstract({path: runtime.declared[path] for path in taken})
        found = self.hub.load_arrays({taken[path]: leaf for path, leaf in abstract.items()})
        return {path: found[theirs] for path, theirs in taken.items()}

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

    def digest(self) -> str:
        return fingerprint(self.hub.config, sorted((p.name, p.stat().st_size) for p in self.hub.folder.iterdir()))


Trained = TrainedRun | TrainedHub


def run_of(hub: HubModel, tokenizer: Path | None = None, folder: str | None = None) -> Train:
    """A run that could go on with a model of the hub: each device has a part of every weight (ZeRO-3).

    `tokenizer`: a copy of its tokenizer.json, to name instead.
    """
    is_image = isinstance(hub.model, ImageConfig)
    data, objective = _images_of(hub.model) if is_image else _text_of(hub, tokenizer)
    return Train(
        model=hub.model,
        data=data,
        objective=objective,
        optimizer=AdamW(Constant(1e-5)),
        steps=1000,
        layout=Layout(mesh={"data": -1}, zero=3),
        run_dir=folder,
    )


def _text_of(hub: HubModel, tokenizer: Path | None) -> tuple[Data, Objective]:
    seq = min(_longest(hub) or SEQ, SEQ)
    return Data(seq=seq, batch=8, tokenizer=tokenizer_of(hub.folder, tokenizer)), text_objective(hub)


def _longest(hub: HubModel) -> int | None:
    """Positions of the longest sequence that its config.json says the model is for."""
    return hub.config.get("max_position_embeddings") or hub.config.get("n_positions")


def _images_of(model: Any) -> tuple[Images, Objective]:
    letters = Letters(size=model.image, channels=model.channels)
    return Images(batch=8, source=letters), Classification(model.image, model.image, model.channels)


def _text_data(train: Train, name: str | Path) -> Data:
    if train.data.text is None:
        raise UserError(f"{name} is a model of images: it has no tokenizer, and neither reads nor writes text")
    return train.data.text


def _fitting(file: TokenizerFile, model: Any) -> TokenizerFile:
    """The tokenizer that a run trained: one with more ids than the model is another run's. One of others may have some
    that the model has not, which a prompt is then refused for."""
    if (ids := file.load().vocab) > model.vocab:
        raise UserError(f"{file.path} has {ids} ids, and the run's model {model.vocab}: it belongs to another run")
    return file


def _on(runtime: Runtime) -> str:
    count = runtime.placement.mesh.size
    return f"on {count} device{'s' if count > 1 else ''}"
