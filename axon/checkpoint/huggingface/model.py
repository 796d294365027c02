"""A model of the hub, opened: its config in ours, and its weights where they are asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from axon.axes.array_spec import ArraySpec
from axon.checkpoint.huggingface.config import read_config, read_fields, unknown_fields, value_at
from axon.checkpoint.huggingface.copies import with_own_arrays
from axon.checkpoint.huggingface.hub import ADAPTER, CONFIG, PREFIX, model_folder
from axon.checkpoint.huggingface.load import as_read, check_weights, load, read_shard
from axon.checkpoint.huggingface.peft import Adapter, EvenFactors, open_adapter
from axon.checkpoint.huggingface.peft_merged import AdaptedWeights
from axon.checkpoint.huggingface.pieces import Pieces, numbered, pieces_of
from axon.checkpoint.huggingface.quantized import QuantizedWeights
from axon.checkpoint.huggingface.tables import table_of
from axon.checkpoint.huggingface.weights import Weights
from axon.data.records import fingerprint
from axon.errors import UserError
from axon.foreign_json import read_json
from axon.model_config import vocab_of
from axon.nn import parameters, variables
from axon.nn.hugging_face import Architecture
from axon.runtime import Runtime, flattened, nested
from axon.runtime.stored import StoredArray


@dataclass(frozen=True)
class HubModel:
    """The content of a model's folder.

    Args:
        name: `hf:…`, as it was given. config: its config.json. table: of its architecture. model: its config in ours.
        weights: its arrays. remarks: what a person should know of how it is read.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    table: Architecture
    model: Any
    weights: Weights
    remarks: tuple[str, ...] = ()

    @property
    def with_mtp(self) -> Any:
        """`model` with its multi-token block, if the files have one."""
        array = self.table.multi_token
        if array is not None and numbered(array, self.model.build()) in self.weights:
            return replace(self.model, multi_token=True)
        return self.model

    def digest(self) -> str:
        """Stands for the config, as far as it says the mathematics, and the weights' first rows."""
        return self._fingerprint(self.weights.digest())

    @cached_property
    def whole_digest(self) -> str:
        """Stands for the config, as far as it says the mathematics, and all the weights: see `Weights.whole_digest`."""
        return self._fingerprint(self.weights.whole_digest())

    def _fingerprint(self, weights: str) -> str:
        said = {name: repr(value_at(self.model, name)) for name in sorted(read_fields(self.table, self.config))}
        return fingerprint(type(self.model).__name__, said, weights)

    def load(
        self, runtime: Runtime, vocab: int | None, each: Callable[[str, Any], Any] = as_read
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters and variables of the runtime's module, nested by path, read straight into their shards.

        `vocab`: how many ids the module has, without padding; None: none. `each`: of `load`. Raises `CheckpointError`
        for weights of another model.
        """
        pieces = self.pieces(runtime.module, vocab)
        specs: dict[str, ArraySpec] = {**runtime.parameters, **runtime.variables}
        read = load(self.weights, pieces, runtime.abstract({path: specs[path] for path in pieces.of}), each=each)
        missing = runtime.variables.keys() - read.keys()
        fresh = flattened(runtime.initialise_variables(0)) if missing else {}
        states = {path: read[path] if path in read else fresh[path] for path in runtime.variables}
        return nested({path: read[path] for path in runtime.parameters}), nested(states)

    def load_arrays(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Some parameters by their paths in a module of `with_mtp`, read straight into their shards and cast.

        `abstract`: their shapes with any padding, dtypes and shardings.
        """
        return load(self.weights, self.pieces(self.with_mtp.build(), vocab_of(self.model)), abstract)

    def lazy(self, module: nnx.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same as arrays that are read when they are saved, block by block."""
        pieces = self.pieces(module, vocab_of(self.model))

        def array(path: str, spec: ArraySpec) -> Any:
            if path in pieces.of:
                return HubArray.of(path, spec, self.weights, pieces)
            return np.zeros(spec.shape, spec.dtype)

        of_module = (parameters(module), variables(module))
        values, states = (nested({path: array(path, spec) for path, spec in specs.items()}) for specs in of_module)
        return values, states

    def pieces(self, module: nnx.Module, vocab: int | None) -> Pieces:
        """Where its arrays are in those of `module`. Raises `CheckpointError` if they are not that module's."""
        found = pieces_of(self.table, module, vocab)
        self.weights.complete(self.table.optional_prefix, found.shapes)
        check_weights(
            self.weights,
            found,
            (*(numbered(name, module) for name in self.table.unused), *(copy.theirs for copy in self.table.copies)),
            self.name,
            type(self.model).__name__,
        )
        return found


def open_model(name: str) -> HubModel:
    """The model `hf:DIR_OR_NAME`, or an adapter's with the adapter merged.

    Raises `UserError` if there is none, none that Axon has, or an adapter of another one.
    """
    folder = model_folder(name)
    if (folder / CONFIG).is_file():
        return _opened(name, folder)
    adapter = open_adapter(name, folder)
    base_folder = model_folder(adapter.base)
    check_base(adapter, _opened(adapter.base, base_folder))
    found = _opened(name, base_folder, adapter)
    found.pieces(found.model.build(), vocab_of(found.model))  # compares the adapter with the model's arrays
    return replace(
        found,
        remarks=(*found.remarks, f"{name}: an adapter of rank {EvenFactors(adapter).rank}, merged into {adapter.base}"),
    )


def open_unmerged(name: str, adapter: str) -> HubModel:
    """The model `hf:DIR_OR_NAME` without an adapter of PEFT's that is merged in it.

    Raises `UserError` for one that is no sum, or of other arrays than the model's.
    """
    folder, of_adapter = model_folder(name), model_folder(adapter)
    found = _opened(name, folder, open_adapter(adapter, of_adapter), sign=-1.0)
    found.pieces(found.model.build(), vocab_of(found.model))  # compares the adapter with the model's arrays
    return found


def check_base(adapter: Adapter, model: HubModel) -> None:
    """Raise `UserError` for an adapter that was trained beside another model, as far as that can be told: by the digest
    that Axon writes; of others by the model that they name, by its numbers where it is a folder here, else by the
    names where both are of the hub's."""
    expected, name = adapter.base_digest, adapter.base
    if expected is None and name.partition("@")[0] != model.name.partition("@")[0]:
        folder = Path(name.removeprefix(PREFIX))
        if folder.is_dir():
            expected = _opened(name, folder).whole_digest if folder.resolve() != model.folder.resolve() else None
        elif not Path(model.name.removeprefix(PREFIX)).exists():
            raise UserError(
                f"{adapter.name} is an adapter of another model than {model.name}: its {ADAPTER} names {name} "
                "(base_model_name_or_path). Give that one, or write the other name there if they are the same"
            )
    if expected not in (None, model.whole_digest):
        raise UserError(
            f"{adapter.name} is an adapter of another model than {model.name}: it was trained beside {name}, of other "
            f"config or weights; their digest is {expected}, and here {model.whole_digest}. Give the one that it was "
            "trained beside"
        )


def _opened(name: str, folder: Path, adapter: Adapter | None = None, sign: float = 1.0) -> HubModel:
    config = read_json(folder / CONFIG)
    try:
        table = table_of(config)
        model, unknown = read_config(table, config), unknown_fields(table, config)
    except UserError as error:
        between = "/" if str(error).startswith(CONFIG) else f"/{CONFIG}: "
        raise UserError(f"{folder}{between}{error}") from error
    weights = _weights(folder, config, adapter, sign)
    model, remarks = with_own_arrays(table, model, weights)
    remarks += [f"config.json: fields that Axon does not read: {', '.join(unknown)}"] if unknown else []
    return HubModel(name, folder, config, table, model, weights, tuple(remarks))


def _weights(folder: Path, config: Mapping[str, Any], adapter: Adapter | None, sign: float) -> Weights:
    few_bits = config.get("quantization_config")
    if adapter is None:
        return QuantizedWeights(folder, few_bits) if few_bits else Weights(folder)
    if few_bits:
        raise UserError(
            f"{adapter.name} is an adapter of {folder}, whose weights are in few bits: it is merged into a copy of "
            "that model in bfloat16 alone. Name one in base_model_name_or_path of its config"
        )
    return AdaptedWeights(folder, adapter, sign)


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class HubArray(StoredArray):
    """One of our arrays in their files."""

    weights: Weights
    pieces: Pieces

    @classmethod
    def of(cls, path: str, spec: ArraySpec, weights: Weights, pieces: Pieces) -> "HubArray":
        no_files: Any = None
        return cls(no_files, path, spec.shape, np.dtype(spec.dtype), no_files, False, weights, pieces)

    def block(self, where: tuple[slice, ...]) -> np.ndarray:
        ranges = tuple((one.start, one.stop) for one in where)
        return read_shard(self.weights, self.pieces, self.name, ranges, self.dtype)
