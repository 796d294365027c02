"""Which layers of a model see a window, in a config.json."""

from collections.abc import Mapping
from typing import Any

from axon.errors import UserError
from axon.foreign_json import COUNT, FLAG, NULL, SIZE, TEXT, list_of, shown
from axon.nn.hugging_face import LAYERS, Converted
from axon.nn.sizes import head_dim

FULL, LOCAL = "full_attention", "sliding_attention"
TYPES = {"layer_types": list_of(TEXT) | NULL}


def uniform_layers(window: str | None = None) -> Converted:
    """Of a model whose layers are all of one kind: of that which sees a window, where their field `window` has one."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        kind = FULL if window is None or config.get(window) is None else LOCAL
        check_types(config, [kind] * config["num_hidden_layers"], f"all layers are {kind} here")
        return {}

    return Converted(read, lambda model: {}, TYPES)


def local_layers(period: int, pattern: str | None = None) -> Converted:
    """Which layers are local; `period`: every how many layers one is full, where a config.json does not say so, as in
    its field `pattern`."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        types, every = config.get("layer_types"), period if pattern is None else config.get(pattern, period)
        if types is not None:
            every = types.index(FULL) + 1 if FULL in types else len(types) + 1
        kinds = [LOCAL if (layer + 1) % every else FULL for layer in range(config["num_hidden_layers"])]
        check_types(config, kinds, "local layers and a full one must come in turn")
        if every == 1:
            raise UserError("config.json: layer_types has full layers alone; there must be local ones between them")
        return {"local_layers": every - 1}

    def write(model: Any) -> dict[str, Any]:
        kinds = [LOCAL] * model.local_layers + [FULL]
        types = [kinds[layer % len(kinds)] for layer in range(model.layers)]
        return {"layer_types": types} | ({} if pattern is None else {pattern: len(kinds)})

    return Converted(read, write, TYPES | ({} if pattern is None else {pattern: LAYERS}))


def windowed_layers(switch: bool) -> Converted:
    """`window`, and `full_layers`, the first so many layers, that do not see it. `switch`: whether the architecture has
    a window only where `use_sliding_window` is true, and then from `max_window_layers` on (Qwen2)."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        layers, types = config["num_hidden_layers"], config.get("layer_types")
        window = config.get("sliding_window", 4096)
        if switch and not config.get("use_sliding_window", False):
            window = None
        full = min(layers, config.get("max_window_layers", 28)) if switch else 0
        if types is not None:
            full = types.index(LOCAL) if LOCAL in types else layers
        full = layers if window is None else full
        check_types(config, [FULL] * full + [LOCAL] * (layers - full), "full ones and then local ones can be followed")
        return {"window": None, "full_layers": 0} if full == layers else {"window": window, "full_layers": full}

    def write(model: Any) -> dict[str, Any]:
        written: dict[str, Any] = {"sliding_window": model.window}
        if model.full_layers:
            written["layer_types"] = [FULL] * model.full_layers + [LOCAL] * (model.layers - model.full_layers)
            written |= {} if switch else {"head_dim": head_dim(model)}  # where there are types, transformers needs it
        if switch:
            written |= {"use_sliding_window": model.window is not None, "max_window_layers": model.full_layers}
        return written

    kinds = TYPES | {"sliding_window": SIZE | NULL}
    return Converted(read, write, kinds | ({"use_sliding_window": FLAG, "max_window_layers": COUNT} if switch else {}))


def check_types(config: Mapping[str, Any], expected: list[str], why: str) -> None:
    """Raise `UserError` where a config.json says of its layers other kinds than are `expected`."""
    types = config.get("layer_types")
    if types is not None and types != expected:
        raise UserError(f"config.json: layer_types is {shown(types)}, of {len(expected)} layers; {why}")
