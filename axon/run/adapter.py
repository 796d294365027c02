"""Adapters as PEFT saves them: LoRA of a run by an adapter's config, and its factors as initial values."""

from typing import Any

from axon.checkpoint.huggingface.hub import model_folder
from axon.checkpoint.huggingface.load import check_weights, load
from axon.checkpoint.huggingface.model import HubModel, open_model
from axon.checkpoint.huggingface.peft import FACTORS, Factors, factors_of, open_adapter
from axon.checkpoint.huggingface.pieces import pieces_of
from axon.checkpoint.huggingface.tables import table_for
from axon.errors import UserError
from axon.fields import Location
from axon.model_config import vocab_of
from axon.nn.lora import AdaptedWeight, LoRA
from axon.runtime import Runtime


def PeftLoRA(source: Location) -> LoRA:
    """LoRA of the weights that the adapter `hf:DIR_OR_NAME` adapts, by its rank and scale; see `InitFrom.adapter`."""
    adapter = open_adapter(source, model_folder(source))
    hub = open_model(adapter.base)
    pieces = hub.pieces(hub.model.build(), vocab_of(hub.model))
    there = {path: [one.name in adapter.factors for one in found] for path, found in pieces.of.items()}
    if some := [path for path, known in there.items() if any(known) and not all(known)]:
        raise UserError(
            f"{source} adapts {some[0]} in some layers alone: LoRA here is of all layers of a kind of block"
        )
    paths = tuple(path for path, known in there.items() if all(known))
    return LoRA(paths, adapter.rank, adapter.alpha, adapter.rank_stabilized)


def factors_in(model: Any, runtime: Runtime) -> Factors:
    """Where PEFT's factors are in the parameters of a runtime of `model` with LoRA."""
    pieces = pieces_of(table_for(model), model.build(), vocab_of(model))
    adapted = [path for path, one in runtime.operands.items() if isinstance(one, AdaptedWeight)]
    return factors_of(pieces, runtime.parameters, adapted)


def read_factors(source: str, base: HubModel | None, runtime: Runtime) -> dict[str, Any]:
    """The factors that a runtime has, read from the adapter `hf:DIR_OR_NAME`, by path.

    Raises `UserError` for one that was trained beside another model than `base`, or of another scale than here, and
    `CheckpointError` for one of other weights or another rank.
    """
    adapter = open_adapter(source, model_folder(source))
    if base is not None:
        adapter.check_base(base.digest(), base.name)
    scales = {one.scale for one in runtime.operands.values() if isinstance(one, AdaptedWeight)}
    if scales != {adapter.scale}:
        raise UserError(
            f"InitFrom.adapter = {source!r} was trained with scale {adapter.scale:g}, and LoRA here has "
            f"{', '.join(f'{one:g}' for one in sorted(scales)) or 'none'}: set Train.transforms = (@PeftLoRA(),) and "
            f"PeftLoRA.source = {source!r}, or LoRA.alpha"
        )
    factors = factors_in(runtime.model, runtime)
    check_weights(adapter.weights, factors.pieces, (), source, "this run's LoRA")
    paths = [
        f"{path}/{one}" for path, here in runtime.operands.items() if isinstance(here, AdaptedWeight) for one in FACTORS
    ]
    return load(adapter.weights, factors.pieces, runtime.abstract({path: runtime.parameters[path] for path in paths}))
