"""A config.json ↔ the dataclass that configures one of our models."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from axon.errors import UserError
from axon.nn.hugging_face import Architecture, Constant, Converted, Field, Of, Required

LOCAL = frozenset({"remat", "unroll", "vocab_multiple", "exchange", "margin", "dropout", "routing.bias_rate"})
"""Fields of our configs that say how a model is computed, stored or trained, not which one it is."""

SILENT = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "_name_or_path"),
        *("problem_type", "id2label", "label2id"),
        *("dtype", "torch_dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "chunk_size_feed_forward"),
        *("initializer_range", "attention_dropout", "pretraining_tp", "is_encoder_decoder", "layer_types"),
        *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
    }
)
"""Fields of theirs that say nothing of the function that a model computes."""


def read_config(architecture: Architecture, config: Mapping[str, Any]) -> Any:
    """Our config of a config.json. Raises `UserError` for what our model cannot be."""
    return _built(architecture.model, read_fields(architecture, config))


def read_fields(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by our names (`routing.top_k`) of a config.json."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "quantized")
        raise UserError(
            f"config.json: quantization_config says that the weights are {method}; Axon reads float32, bfloat16 and "
            "float16. Use a copy of the model with such weights, as transformers makes with `dequantize`"
        )
    values = dict(architecture.fixed)
    for one in architecture.fields:
        if isinstance(one, Field):
            values[one.ours] = _value(one, config)
        elif isinstance(one, Constant):
            _check_constant(architecture, one, config)
        else:
            values |= one.read(config)
    return values


def write_config(architecture: Architecture, model: Any) -> dict[str, Any]:
    """A config.json of our config, which `architecture` must be able to say (see `unrepresented`)."""
    written = {"architectures": [architecture.name], "model_type": architecture.model_type}
    for one in architecture.fields:
        if isinstance(one, Field):
            value = value_at(model, one.ours)
            written |= {} if value is None and one.default is None else {one.theirs: value}
        elif isinstance(one, Constant):
            written[one.theirs] = one.value
        else:
            written |= one.write(model)
    return written


def unrepresented(architecture: Architecture, model: Any) -> list[str]:
    """The fields of our config that `architecture` cannot say, as lines; none where it can say all."""
    if not isinstance(model, architecture.model):
        return [f"it is for {architecture.model.__name__}, not {type(model).__name__}"]
    try:
        said = read_fields(architecture, write_config(architecture, model))
    except UserError as error:
        return [str(error)]
    return [f"{name} is {value_at(model, name)!r}, and would become {said[name]!r}" for name in _changed(said, model)]


def changed_fields(architecture: Architecture, config: Mapping[str, Any], model: Any) -> list[str]:
    """The fields of our config whose value is not what a config.json says, by name."""
    return _changed(read_fields(architecture, config), model)


def _changed(said: Mapping[str, Any], model: Any) -> list[str]:
    return [name for name, value in said.items() if name not in LOCAL and value_at(model, name) != value]


def unknown_fields(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Names of a config.json that nothing here reads."""
    known = set(SILENT.union(architecture.silent))
    for one in architecture.fields:
        known |= set(one.theirs) if isinstance(one, Converted) else {one.theirs}
        known |= set(one.also) if isinstance(one, Field) else set()
        known |= set(one.moot) if isinstance(one, Constant) else set()
    return sorted(config.keys() - known)


def value_at(config: Any, name: str) -> Any:
    """The value of `routing.top_k`."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _value(one: Field, config: Mapping[str, Any]) -> Any:
    for name in (one.theirs, *one.also):
        if name in config and (config[name] is not None or one.default is None):
            return config[name]
    if one.default is Required:
        raise UserError(f"config.json: there is no field {one.theirs!r}, which says {one.ours!r} of the model")
    if isinstance(one.default, Of):
        return config[one.default.theirs]
    return None if one.theirs in config else one.default


def _check_constant(architecture: Architecture, one: Constant, config: Mapping[str, Any]) -> None:
    found = config.get(one.theirs, one.value)
    if found != one.value and found not in one.also:
        raise UserError(
            f"config.json: {one.theirs} is {found!r}; the model {architecture.model.__name__} as {architecture.name} "
            f"has {one.value!r} alone"
        )


def _built(kind: type, values: Mapping[str, Any]) -> Any:
    """An object of the dataclass `kind` from values by name, those within others too."""
    own = {name: value for name, value in values.items() if "." not in name}
    within: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if "." in name:
            outer, _, inner = name.partition(".")
            within.setdefault(outer, {})[inner] = value
    hints = get_type_hints(kind) if within else {}
    for outer, inner in within.items():
        own[outer] = _built(_dataclass(hints[outer]), inner)
    return kind(**own)


def _dataclass(hint: Any) -> Any:
    return next(one for one in (hint, *get_args(hint)) if is_dataclass(one))
