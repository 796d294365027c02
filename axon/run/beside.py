"""An adapter beside the model of a run or of the hub: of PEFT's, or of another run with LoRA."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from axon.checkpoint.huggingface.hub import ADAPTER, PREFIX, is_hub, model_folder
from axon.checkpoint.huggingface.peft import open_adapter
from axon.checks import check_range
from axon.disk import as_path
from axon.errors import UserError
from axon.nn import parameters
from axon.nn.lora import LoRA
from axon.nn.multi_lora import MultiLoRA, Room
from axon.path_patterns import listed
from axon.run.adapter import adapted_pieces, factor_specs, lora_of, lora_of_run, read_factors
from axon.run.trained import PARAMETERS, Report, Trained, TrainedHub, TrainedRun
from axon.runtime import Runtime, flattened
from axon.serve.adapters import ROOM, Adapter
from axon.serve.engine import Engine
from axon.serve.replicas import Replicas
from axon.train.optimizers import Averaging

LOADED = 64
"""Of which rank adapters may be that clients load, all together, where nothing is said."""


class Beside(Protocol):
    """An adapter that is opened for a model: `lora` is the transform that gives the model its factors."""

    lora: LoRA

    def read(self, runtime: Runtime, base: Mapping[str, Array]) -> dict[str, Array]:
        """The factors, by path, of a runtime of the model with `lora`; `base`: the model's parameters by path, as they
        are stored. Raises `UserError` for an adapter of other ones."""
        ...


def adapter_beside(source: str, trained: Trained) -> Beside:
    """The adapter in a folder of PEFT's, `hf:DIR_OR_NAME`, or the folder of a run with LoRA, for a model.

    Raises `UserError` if there is none, or it is of another model, or more than two factors.
    """
    found = _adapter(source, trained)
    if found.lora.others:
        raise UserError(
            f"{source} has other parameters of the model anew (modules_to_save, LoRA.others: "
            f"{', '.join(listed(found.lora.others))}), and beside a model are factors alone: name it as the model, in "
            "which it is merged"
        )
    if found.lora.dora:
        raise UserError(
            f"{source} is an adapter of DoRA (LoRA.dora, use_dora), which scales the model's own products too, and "
            f"beside a model are factors alone: name it as the model, in which it is merged, "
            f"{source if is_hub(source) or not (Path(source) / ADAPTER).is_file() else PREFIX + source}"
        )
    if not found.lora.keeps_weights:
        raise UserError(
            f"{source} is of LoRA.init = 'pissa', whose factors have a part of the model's weights: axon export "
            f"{source} OUT --adapter makes an adapter of the model of them, {PREFIX}OUT; or name the run as the model"
        )
    return found


def _adapter(source: str, trained: Trained) -> Beside:
    if is_hub(source):
        return _OfPeft(source, trained)
    folder = Path(as_path(source, "the adapter"))
    if (folder / ADAPTER).is_file():
        return _OfPeft(PREFIX + source, trained)
    if folder.is_dir() and not (folder / "config.gin").is_file():
        raise UserError(
            f"{source} is no adapter: it has neither {ADAPTER}, as of PEFT, nor config.gin, as a run has it"
        )
    return _OfRun(source, trained)


@dataclass(frozen=True)
class ServedAdapters:
    """Adapters that are served beside a model.

    Args:
        sources: name, by which requests name it → what `adapter_beside` takes. load_more: whether clients may load and
            unload others. rank: of all at once, added up; None: of those of `sources`, and of LOADED more if others may
            be loaded.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    load_more: bool = False
    rank: int | None = None

    def __post_init__(self):
        check_range(self, "[1, 2**16]", "rank")
        if self.rank is not None and not (self.sources or self.load_more):
            raise UserError(f"{ROOM} {self.rank} is for adapters: give --adapter NAME=PATH or --load-adapters, too")

    def room(self, model: str, trained: Trained) -> Room:
        """What there is room for: beside what any adapter may be of, what those of `sources` are of. Raises `UserError`
        for what is no adapter of a model, and for one with its name, `model`."""
        if model in self.sources:
            raise UserError(f"--adapter {model}={self.sources[model]} has the name of the model; give it another")
        own = [adapter_beside(source, trained).lora for source in self.sources.values()]
        weights = parameters(trained.train.model.build())
        rank = sum(lora.rank for lora in own) + LOADED * self.load_more if self.rank is None else self.rank
        default = {path for path, spec in weights.items() if MultiLoRA(rank, None).fits(path, spec)}
        named = {path for path, spec in weights.items() if any(lora.fits(path, spec) for lora in own)}
        return Room(rank, None if named <= default else tuple(sorted(default | named)))

    def load(self, engine: Engine | Replicas, read: Callable[[str], Adapter], report: Report) -> None:
        """Have an engine of the model serve them."""
        for name, source in self.sources.items():
            engine.load_adapter(name, adapter := read(source))
            report(f"adapter {name!r} of rank {adapter.rank}, of {source}")


def reader_for(trained: Trained, engine: Engine | Replicas) -> Callable[[str], Adapter]:
    """What reads an adapter for an engine of a model, from what `adapter_beside` takes."""
    first = engine.engines[0] if isinstance(engine, Replicas) else engine

    def read(source: str) -> Adapter:
        found, runtime = adapter_beside(source, trained), first.runtime
        own = Runtime(trained.train.model, runtime.layout, placement=runtime.placement, transforms=(found.lora,))
        factors = found.read(own, flattened(first.parameters))
        scales = {"a": 1.0, "b": found.lora.scale}
        return Adapter(
            found.lora.rank,
            {path: scales[path[-1]] * np.asarray(value, np.float32) for path, value in factors.items()},
        )

    return read


class _OfPeft:
    def __init__(self, source: str, trained: Trained):
        self._source, self._hub = source, trained.hub if isinstance(trained, TrainedHub) else None
        model, name = trained.train.model, "this model" if self._hub is None else self._hub.name
        folder = model_folder(source)
        if not (folder / ADAPTER).is_file():
            raise UserError(f"{source} is a model, and no adapter: it has no {ADAPTER}")
        self.lora = lora_of(open_adapter(source, folder), adapted_pieces(model, self._hub), name)

    def read(self, runtime: Runtime, base: Mapping[str, Array]) -> dict[str, Array]:
        return read_factors(self._source, self._hub, runtime)


class _OfRun:
    """Of a run, which has its base too: config and numbers are compared with the model's."""

    def __init__(self, source: str, trained: Trained):
        self._source, self._run = source, TrainedRun(source)
        train = self._run.train
        self.lora = lora_of_run(train, source)
        if isinstance(train.optimizer, Averaging):
            raise UserError(f"{source} averages its parameters: axon export {source} OUT --adapter, and name hf:OUT")
        mine, theirs = type(trained.train.model), type(train.model)
        differing = trained.changed(train.model, whole=True) if mine is theirs else {"": f"{theirs.__name__}"}
        if differing:
            raise UserError(
                f"{source} is an adapter of another model, a {mine.__name__} here: {next(iter(differing.values()))}. "
                "Give the one that it was trained beside"
            )

    def read(self, runtime: Runtime, base: Mapping[str, Array]) -> dict[str, Array]:
        self._check_base(runtime, base)
        return self._run.read_stored(runtime.abstract(factor_specs(runtime)))

    def _check_base(self, runtime: Runtime, base: Mapping[str, Array]) -> None:
        """Of what the run has frozen, vectors and the smallest matrix that it adapts have to be the model's."""
        reader = self._run.reader()
        stored = reader.offered(PARAMETERS)
        matrices = [one for path in runtime.operands if (one := f"{path}/base") in stored and one in base]
        vectors = [path for path, one in runtime.declared.items() if len(one.own) == 1 and path in stored]
        smallest = sorted(matrices, key=lambda path: stored[path].size)[:1]
        wanted = {path: _as_stored(base[path], stored[path]) for path in (*vectors, *smallest) if path in base}
        for path, value in reader.restore_arrays(PARAMETERS, wanted).items():
            if not jnp.array_equal(value.astype(jnp.bfloat16), base[path].astype(jnp.bfloat16)):
                raise UserError(
                    f"{self._source} is an adapter of another model: its {path} is not that of this one, though the "
                    "config is the same. Give the one that it was trained beside"
                )


def _as_stored(here: Array, there: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(here.shape, there.dtype, sharding=here.sharding)
