"""Which layers of a model see a window, in a config.json."""

from collections.abc import Mapping
from typing import Any

from axon.errors import UserError
from axon.nn.hugging_face import Converted


def local_layers(period: int) -> Converted:
    """Which layers are local; `period`: every how many layers one is full, where a config.json does not say."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        found = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", period))
        types = config.get("layer_types") or []
        local = types.index("full_attention") if "full_attention" in types else found - 1
        if any((kind == "full_attention") != (layer % (local + 1) == local) for layer, kind in enumerate(types)):
            raise UserError(f"config.json: layer_types is {types}; local layers and a full one must come in turn")
        return {"local_layers": local}

    def write(model: Any) -> dict[str, Any]:
        kinds = ["sliding_attention"] * model.local_layers + ["full_attention"]
        types = [kinds[layer % len(kinds)] for layer in range(model.layers)]
        return {"layer_types": types, "sliding_window_pattern": len(kinds)}

    return Converted(read, write, ("layer_types", "sliding_window_pattern", "_sliding_window_pattern"))
