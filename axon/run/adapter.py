"""Adapters as PEFT saves them: LoRA of a run by an adapter's config, and its factors as initial values."""

from collections.abc import Collection, Mapping
from typing import Any

from axon.axes import ArraySpec
from axon.checkpoint.huggingface.hub import PREFIX, model_folder
from axon.checkpoint.huggingface.load import check_weights, load
from axon.checkpoint.huggingface.model import HubModel, check_base, open_model
from axon.checkpoint.huggingface.peft import FACTORS, Adapter, EvenFactors, open_adapter
from axon.checkpoint.huggingface.peft_factors import Factors, factors_of, joined_factors
from axon.checkpoint.huggingface.pieces import Pieces, pieces_of
from axon.checkpoint.huggingface.tables import table_for
from axon.errors import UserError, suggest
from axon.fields import Location
from axon.model_config import vocab_of
from axon.nn.adapted_weight import AdaptedWeight
from axon.nn.lora import LoRA
from axon.path_patterns import Patterns, matches
from axon.runtime import Runtime


def PeftLoRA(source: Location) -> LoRA:
    """LoRA of the weights that the adapter `hf:DIR_OR_NAME` adapts, by its rank and scale; see `InitFrom.adapter`."""
    adapter = open_adapter(source, model_folder(source))
    hub = open_model(adapter.base)
    return lora_of(adapter, hub.pieces(hub.model.build(), vocab_of(hub.model)), hub.name)


def lora_of(adapter: Adapter, pieces: Pieces, base: str) -> LoRA:
    """LoRA of the weights that an adapter adapts, of a model with the arrays `pieces`, called `base`; of several ranks
    it is the largest. What the adapter has anew of the model are its `others`.

    Raises `UserError` for an adapter of arrays that the model has not, or of some layers alone, and for a bias of its
    products.
    """
    for name in (*adapter.factors, *adapter.saved):
        if name not in pieces.shapes:
            raise UserError(f"{adapter.name} adapts {name}, which {base} has not.{suggest(name, pieces.shapes)}")
    if adapter.biases:
        raise UserError(
            f"{adapter.name} adds biases to its products (lora_bias), which LoRA here has not: take it as the model, "
            f"in which it is merged, {PREFIX}{adapter.folder}"
        )
    even = EvenFactors(adapter)
    paths, others = (_paths_of(adapter.name, names, pieces) for names in (adapter.factors, adapter.replaced))
    return LoRA(paths, even.rank, even.alpha, adapter.rank_stabilized, adapter.dora, others=others)


def _paths_of(adapter: str, names: Collection[str], pieces: Pieces) -> tuple[str, ...]:
    """Our parameters that are these arrays."""
    there = {path: [one.name in names for one in found] for path, found in pieces.of.items()}
    if some := [path for path, known in there.items() if any(known) and not all(known)]:
        raise UserError(
            f"{adapter} adapts {some[0]} in some layers alone: LoRA here is of all layers of a kind of block"
        )
    return tuple(path for path, known in there.items() if all(known))


def joined_in(
    runtime: Runtime, base: HubModel, values: Mapping[str, Any], others: Patterns
) -> tuple[Factors, dict[str, Any]]:
    """Where PEFT's factors are in the parameters of a runtime with LoRA, whose `others` train beside them, and these
    parameters, of which weights that are one array of the base's have one A: see `joined_factors`."""
    pieces = adapted_pieces(runtime.model, base)
    specs, joined = joined_factors(pieces, runtime.parameters, _adapted(runtime), values)
    factors = factors_of(pieces, specs, _adapted(runtime))
    trained = [path for path in runtime.parameters if others and path in pieces.of and matches(path, others)]
    return (factors.with_saved(pieces, trained) if trained else factors), joined


def adapted_pieces(model: Any, base: HubModel | None) -> Pieces:
    """Where the arrays of `model` are in those of a model of the hub, or of one as it would go out."""
    return pieces_of(base.table if base else table_for(model), model.build(), vocab_of(model))


def _adapted(runtime: Runtime) -> list[str]:
    return [path for path, one in runtime.operands.items() if isinstance(one, AdaptedWeight)]


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
    pieces, even = adapted_pieces(runtime.model, base), EvenFactors(adapter)
    factors = factors_of(pieces, runtime.parameters, _adapted(runtime))
    check_weights(even, factors.pieces, (), source, "this run's LoRA")
    read = load(even, factors.pieces, runtime.abstract(factor_specs(runtime)))
    return read | _replaced(adapter, pieces, runtime)


def _replaced(adapter: Adapter, pieces: Pieces, runtime: Runtime) -> dict[str, Any]:
    """Our parameters that an adapter has anew. Raises `UserError` where LoRA does not train them."""
    paths = _paths_of(adapter.name, adapter.replaced, pieces)
    if frozen := [path for path in paths if not runtime.declared[path].trained]:
        raise UserError(
            f"InitFrom.adapter = {adapter.name!r} has {frozen[0]} anew (modules_to_save), which LoRA here does not "
            f"train: set Train.transforms = (@PeftLoRA(),), or LoRA.others = {paths}"
        )
    for name in adapter.replaced:
        adapter.weights.rename(adapter.saved[name], name)
    return load(adapter.weights, pieces, runtime.abstract({path: runtime.parameters[path] for path in paths}))


def factor_specs(runtime: Runtime) -> dict[str, ArraySpec]:
    """The specs of the factors that a runtime with LoRA has, by path."""
    paths = [f"{one}/{factor}" for one in _adapted(runtime) for factor in FACTORS]
    return {path: runtime.parameters[path] for path in paths if path in runtime.parameters}


def lora_of_run(train: Any, run: str) -> LoRA:
    """The LoRA of a run's configuration. Raises `UserError` for one that has not one LoRA."""
    adapting = [one for one in train.weight_transforms if isinstance(one, LoRA)]
    if len(adapting) != 1:
        raise UserError(f"{run} has {len(adapting)} LoRA in Train.transforms; an adapter is of one")
    return adapting[0]
