"""A config.json ↔ the dataclass that configures one of our models."""

import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from axon.checkpoint.huggingface.quantized import READ, is_read, method_of
from axon.errors import UserError
from axon.foreign_json import NULL, OBJECT, SIZE, TEXT, Kind, list_of, one_of, read_field, shown
from axon.nn.hugging_face import INSIDE, TOKEN_ID, Architecture, Constant, Converted, Field, Ignored, SameAs, ignored
from axon.nn.hugging_face_rope import OF_LOCAL, unknown_in_ropes

LOCAL = frozenset({"vocab_multiple", "dropout", "routing.bias_rate"})
"""Fields of our configs that say how a model is computed, stored or trained, not which one it is."""

EVERY = (
    Ignored("architectures", list_of(TEXT) | NULL),
    Ignored("model_type", TEXT),
    Ignored("dtype", TEXT | NULL),
    Ignored("torch_dtype", TEXT | NULL),
    Ignored("bos_token_id", TOKEN_ID),
    Ignored("eos_token_id", TOKEN_ID | list_of(TOKEN_ID)),
    Ignored("pad_token_id", TOKEN_ID),
    Ignored("max_position_embeddings", SIZE),
    Constant("per_layer_config", None),
    Constant("pruned_heads", {}, also=(None,)),
    *ignored(
        *("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "auto_map", "task_specific_params"),
        *("problem_type", "id2label", "label2id", "num_labels", "finetuning_task", "tokenizer_class", "prefix"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16"),
        *("attn_implementation", "_attn_implementation_autoset", "experts_implementation", "gradient_checkpointing"),
        *("chunk_size_feed_forward", "initializer_range", "attention_dropout", "pretraining_tp", "is_encoder_decoder"),
        *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "sep_token_id", "is_decoder"),
        *("add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "tf_legacy_loss"),
        *("decoder_start_token_id", "classifier_dropout", "initializer_factor", "sequence_classification_metadata"),
        # Defaults of generation, which transformers takes from generation_config.json.
        *("assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens"),
        *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "epsilon_cutoff"),
        *("encoder_repetition_penalty", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id"),
        *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "num_beam_groups", "num_beams"),
        *("num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty"),
        *("return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p"),
        "typical_p",
    ),
)
"""Fields of every family, unless its table has them."""
FILE = "config.json"


def read_config(architecture: Architecture, config: Mapping[str, Any]) -> Any:
    """Our config of a config.json. Raises `UserError` for what our model cannot be."""
    values = read_fields(architecture, config)
    try:
        return _built(architecture.model, values, architecture.within)
    except UserError as error:
        raise UserError(f"{FILE}: {error}{_theirs(architecture, str(error))}") from error


def _theirs(architecture: Architecture, message: str) -> str:
    """The names in a config.json of the fields of ours that a message names."""
    words = set(re.findall(r"\w+", message))
    fields = [one for one in architecture.fields if isinstance(one, Field) and one.ours.rpartition(".")[2] in words]
    named = ", ".join(f"{one.ours} is {one.theirs}" for one in fields)
    return f" ({named} in {FILE})" if named else ""


def read_fields(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Values by our names (`routing.top_k`) of a config.json."""
    _check_not_quantized(config)
    resolved = _resolved(architecture, config)
    values = dict(architecture.fixed)
    for one in architecture.fields:
        if isinstance(one, Field):
            values[one.ours] = resolved.get(one.theirs)
        elif isinstance(one, Converted):
            values |= one.read(resolved)
    return values


def kinds_of(architecture: Architecture) -> dict[str, Kind]:
    """Each field of a config.json that is known → what it can be."""
    return {name: kind for one in _entries(architecture) for name, kind in _kinds(one).items()}


def write_config(architecture: Architecture, model: Any) -> dict[str, Any]:
    """A config.json of our config, which `architecture` must be able to say (see `unrepresented`)."""
    written = {"architectures": [architecture.name], "model_type": architecture.model_type}
    for one in architecture.fields:
        if isinstance(one, Field):
            value = value_at(model, one.ours)
            value = one.unset(model) if value is None and one.default is not None and one.unset else value
            written |= {} if value is None and one.default is None else {one.theirs: one.kind.written(value)}
        elif isinstance(one, Constant):
            written[one.theirs] = one.value
        elif isinstance(one, Converted):
            written |= one.write(model)
    return written


def rewritten(architecture: Architecture, before: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """A config.json that says our config, with what it said `before` of other things: nothing that is said in several
    places, as of rotary frequencies, is left in one of them."""
    said = {name for one in architecture.fields if not isinstance(one, Ignored) for name in _kinds(one)}
    said -= {name for one in EVERY for name in _kinds(one)}
    return {name: value for name, value in before.items() if name not in said} | write_config(architecture, model)


def unrepresented(architecture: Architecture, model: Any) -> list[str]:
    """The fields of our config that `architecture` cannot say, as lines; none where it can say all."""
    kinds = [(architecture.model, model), *((kind, getattr(model, name)) for name, kind in architecture.within.items())]
    for expected, actual in kinds:
        if not isinstance(actual, expected):
            return [f"it is for {expected.__name__}, not {type(actual).__name__}"]
    try:
        said = read_fields(architecture, write_config(architecture, model))
    except UserError as error:
        return [str(error)]
    return [
        f"{name} is {value_at(model, name)!r}, and would become {said[name]!r}"
        for name in _changed(architecture, said, model)
    ]


def changed_fields(architecture: Architecture, before: Any, model: Any) -> list[str]:
    """The fields of our config, of those that a config.json says, whose value in `model` is not that in `before`."""
    names = read_fields(architecture, write_config(architecture, before))
    return _changed(architecture, {name: value_at(before, name) for name in names}, model)


def _changed(architecture: Architecture, said: Mapping[str, Any], model: Any) -> list[str]:
    unset = {one.ours: one.unset for one in architecture.fields if isinstance(one, Field) and one.unset}
    for one in architecture.fields:
        unset |= one.unset if isinstance(one, Converted) else {}

    def meant(name: str, value: Any) -> Any:
        return unset[name](model) if value is None and name in unset else value

    return [
        name
        for name, value in said.items()
        if name.removeprefix(f"{INSIDE}.") not in LOCAL and meant(name, value) != meant(name, value_at(model, name))
    ]


def unknown_fields(architecture: Architecture, config: Mapping[str, Any]) -> list[str]:
    """Names of a config.json that nothing here reads."""
    known = kinds_of(architecture).keys() | {"quantization_config"}
    return sorted(config.keys() - known) + unknown_in_ropes(config, by_layer=OF_LOCAL in known)


def value_at(config: Any, name: str) -> Any:
    """The value of `routing.top_k`."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _entries(architecture: Architecture) -> list[Field | Constant | Ignored | Converted]:
    """All fields of a family: its own, and those of every family that it does not have itself."""
    own = {name for one in architecture.fields for name in _kinds(one)}
    return [one for one in EVERY if one.theirs not in own] + list(architecture.fields)


def _kinds(one: Field | Constant | Ignored | Converted) -> Mapping[str, Kind]:
    if isinstance(one, Converted):
        return one.kinds
    if isinstance(one, Constant):
        return {one.theirs: one_of(one.value, *one.also)}
    return dict.fromkeys((one.theirs, *one.also) if isinstance(one, Field) else (one.theirs,), one.kind)


def _resolved(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose fields are of their kinds, with the defaults of the table's `Field`s; none that is None."""
    for one in _entries(architecture):
        for name, kind in _kinds(one).items():
            if name in config and not kind.accepts(config[name]):
                note = f"; {architecture.model.__name__} as {architecture.name} has no other" * isinstance(
                    one, Constant
                )
                raise UserError(f"{FILE}: {name} is {shown(config[name])}; must be {kind.expected}{note}")
    fields = [one for one in architecture.fields if isinstance(one, Field)]
    values = {one.theirs: _value(one, config) for one in fields}
    values |= {name: values[value.theirs] for name, value in values.items() if isinstance(value, SameAs)}
    return dict(config) | {name: value for name, value in values.items() if value is not None or name in config}


def _value(one: Field, config: Mapping[str, Any]) -> Any:
    """The value of a field, which may be `SameAs` another."""
    said = {name: config[name] for name in (one.theirs, *one.also) if name in config}
    if len(differing := {shown(value) for value in said.values()}) > 1:
        raise UserError(f"{FILE}: {' and '.join(said)} mean the same, and are {' and '.join(sorted(differing))}")
    if not said:
        return read_field(FILE, config, one.theirs, one.kind, one.default)
    value = next(iter(said.values()))
    return one.null if value is None else value


def _check_not_quantized(config: Mapping[str, Any]) -> None:
    about = read_field(FILE, config, "quantization_config", OBJECT | NULL, None)
    if about and not is_read(about):
        method = shown(about["quant_method"]) if "quant_method" in about else "quantized"
        raise UserError(
            f"{FILE}: quantization_config says that the weights are {method}; Axon reads float32, bfloat16, float16, "
            f"and {', '.join(READ)} (bitsandbytes in 4 bits). Use a copy of the model with such weights, as "
            "transformers makes with `dequantize`"
        )
    if about:
        method_of(about)


def _built(kind: type, values: Mapping[str, Any], classes: Mapping[str, type]) -> Any:
    """An object of the dataclass `kind` from values by name, those within others too; `classes`: of fields whose
    annotation has none."""
    own = {name: value for name, value in values.items() if "." not in name}
    within: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if "." in name:
            outer, _, inner = name.partition(".")
            within.setdefault(outer, {})[inner] = value
    hints = get_type_hints(kind) if within else {}
    for outer, inner in within.items():
        own[outer] = _built(classes.get(outer) or _dataclass(hints[outer]), inner, {})
    return kind(**own)


def _dataclass(hint: Any) -> Any:
    return next(one for one in (hint, *get_args(hint)) if is_dataclass(one))
