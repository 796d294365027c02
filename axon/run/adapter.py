"""Adapters as PEFT saves them: LoRA of a run by an adapter's config, and its factors as initial values."""

from typing import Any

from axon.axes import ArraySpec
from axon.checkpoint.huggingface.hub import model_folder
from axon.checkpoint.huggingface.load import check_weights, load
from axon.checkpoint.huggingface.model import HubModel, check_base, open_model
from axon.checkpoint.huggingface.peft import FACTORS, Adapter, Factors, factors_of, open_adapter
from axon.checkpoint.huggingface.pieces import Pieces, pieces_of
from axon.checkpoint.huggingface.tables import table_for
from axon.errors import UserError, suggest
from axon.fields import Location
from axon.model_config import vocab_of
from axon.nn.adapted_weight import AdaptedWeight
from axon.nn.lora import LoRA
from axon.runtime import Runtime


def PeftLoRA(source: Location) -> LoRA:
    """LoRA of the weights that the adapter `hf:DIR_OR_NAME` adapts, by its rank and scale; see `InitFrom.adapter`."""
    adapter = open_adapter(source, model_folder(source))
    hub = open_model(adapter.base)
    return lora_of(adapter, hub.pieces(hub.model.build(), vocab_of(hub.model)), hub.name)


def lora_of(adapter: Adapter, pieces: Pieces, base: str) -> LoRA:
    """LoRA of the weights that an adapter adapts, of a model with the arrays `pieces`, called `base`.

    Raises `UserError` for an adapter of arrays that the model has not, or of some layers alone.
    """
    if absent := [name for name in adapter.factors if name not in pieces.shapes]:
        raise UserError(f"{adapter.name} adapts {absent[0]}, which {base} has not.{suggest(absent[0], pieces.shapes)}")
    there = {path: [one.name in adapter.factors for one in found] for path, found in pieces.of.items()}
    if some := [path for path, known in there.items() if any(known) and not all(known)]:
        raise UserError(
            f"{adapter.name} adapts {some[0]} in some layers alone: LoRA here is of all layers of a kind of block"
        )
    paths = tuple(path for path, known in there.items() if all(known))
    return LoRA(paths, adapter.rank, adapter.alpha, adapter.rank_stabilized, adapter.dora)


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
        check_base(adapter, base)
    if any(one.principal for one in runtime.operands.values() if isinstance(one, AdaptedWeight)):
        raise UserError(
            f"InitFrom.adapter = {source!r} is beside the weights of its model, of which LoRA.init = 'pissa' takes a "
            "part: leave one of the two out"
        )
    scales = {one.scale for one in runtime.operands.values() if isinstance(one, AdaptedWeight)}
    if scales != {adapter.scale}:
        raise UserError(
            f"InitFrom.adapter = {source!r} was trained with scale {adapter.scale:g}, and LoRA here has "
            f"{', '.join(f'{one:g}' for one in sorted(scales)) or 'none'}: set Train.transforms = (@PeftLoRA(),) and "
            f"PeftLoRA.source = {source!r}, or LoRA.alpha"
        )
    factors = factors_in(runtime.model, runtime)
    check_weights(adapter.weights, factors.pieces, (), source, "this run's LoRA")
    return load(adapter.weights, factors.pieces, runtime.abstract(factor_specs(runtime)))


def factor_specs(runtime: Runtime) -> dict[str, ArraySpec]:
    """The specs of the factors that a runtime with LoRA has, by path."""
    adapted = [path for path, one in runtime.operands.items() if isinstance(one, AdaptedWeight)]
    paths = [f"{one}/{factor}" for one in adapted for factor in FACTORS]
    return {path: runtime.parameters[path] for path in paths if path in runtime.parameters}


def lora_of_run(train: Any, run: str) -> LoRA:
    """The LoRA of a run's configuration. Raises `UserError` for one that has trained more than one adapter."""
    adapting = [one for one in train.weight_transforms if isinstance(one, LoRA)]
    if len(adapting) != 1:
        raise UserError(f"{run} has {len(adapting)} LoRA in Train.transforms; an adapter is of one")
    if adapting[0].others:
        raise UserError(
            f"{run} trained {adapting[0].others} beside its adapters (LoRA.others), which an adapter has not: merge "
            "it, axon convert RUN hf:DIR"
        )
    return adapting[0]
