"""Adapters as they go out to PEFT, of the models of fixtures.

Run as a script it stores their configs and shapes in fixtures/adapters_out.json; `fixtures/make.py adapters` opens each
in `peft`, and stores a sketch of its logits.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from reference import FOLDER, load, weights
from safetensors.numpy import load_file, save_file

from axon.checkpoint.huggingface.model import HubModel, open_model
from axon.layout import Layout
from axon.nn.lora import LoRA
from axon.run.export_adapter import write_lora
from axon.runtime import Runtime, flattened, nested

FILE = FOLDER / "adapters_out.json"
ADAPTERS = {
    "gpt2 out": LoRA(rank=2, alpha=1.0),
    "gpt2 out dora": LoRA(("*/attention/*",), rank=2, alpha=3.0, dora=True),
    "phi3 out": LoRA(("*/value", "*/query", "*/up", "*/gate", "*/out"), rank=3, alpha=2.0, rank_stabilized=True),
    "llama31 out": LoRA(rank=2, alpha=2.0, others=("head", "*norm/scale")),
}
"""Matrices that are one array of theirs, and parameters that train beside them."""


def saved(folder: Path, kind: str, config: dict[str, Any], family: str, shapes: dict[str, Any]) -> Path:
    """A folder of the hub's, with random arrays of these shapes."""
    folder.mkdir()
    (folder / f"{kind}config.json").write_text(json.dumps(config))
    arrays = weights(family, {name: tuple(shape) for name, shape in shapes.items()})
    save_file(arrays, folder / f"{kind}model.safetensors", {"format": "pt"})
    return folder


def written(name: str, folder: Path, rng: np.random.Generator) -> tuple[HubModel, Runtime, dict[str, Any], Path]:
    """An adapter of random numbers: the model, a runtime with it, its parameters, and where it is for PEFT."""
    model, lora = load(family := name.split()[0]), ADAPTERS[name]
    hub = open_model(f"hf:{saved(folder / 'base', '', model.config, family, model.shapes | model.buffers)}")
    plain = Runtime(hub.model, Layout({"data": 1}), devices=jax.devices()[:1])
    own = Runtime(hub.model, plain.layout, placement=plain.placement, transforms=(lora,))
    whole = hub.load_arrays(plain.abstract(plain.parameters))
    values = flattened(nested({path: own.derived(path, value) for path, value in whole.items()}))
    changed = [path for path in own.parameters if path not in values or own.parameters[path].trained]
    values |= {path: rng.normal(size=own.parameters[path].shape).astype(np.float32) for path in changed}
    (folder / "adapter").mkdir()
    write_lora(folder / "adapter", lora, own, values, hub)
    return hub, own, values, folder / "adapter"


def going_out(adapter: Path) -> dict[str, Any]:
    """The config, but for where the model is, and the shapes of the arrays."""
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "base"}
    arrays = load_file(adapter / "adapter_model.safetensors")
    return {"config": config, "shapes": {name: [*value.shape] for name, value in sorted(arrays.items())}}


if __name__ == "__main__":
    lines = []
    for one in ADAPTERS:
        with tempfile.TemporaryDirectory() as path:
            made = going_out(written(one, Path(path), np.random.default_rng(0))[3])
            lines.append(f"{json.dumps(one)}: {json.dumps(made)}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
