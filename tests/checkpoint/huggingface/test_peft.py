"""Adapters that `peft` saved beside models of `transformers`: their logits (tests/models/fixtures/make_adapters.py)."""

import json

import jax
import pytest
from reference import FOLDER, load, relative_error, sketch, weights
from safetensors.numpy import save_file

from axon.checkpoint.huggingface.model import open_model
from axon.layout import Layout
from axon.runtime import Runtime
from axon.serve.logits import logits

STORED = json.loads((FOLDER / "adapters.json").read_text())


def saved(folder, kind, config, family, shapes):
    """A folder of the hub's, with random arrays of these shapes."""
    folder.mkdir()
    (folder / f"{kind}config.json").write_text(json.dumps(config))
    arrays = weights(family, {name: tuple(shape) for name, shape in shapes.items()})
    save_file(arrays, folder / f"{kind}model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", STORED)
def test_an_adapter_of_peft_computes_what_peft_computes(name, tmp_path):
    family, stored = name.split()[0], STORED[name]
    model = load(family)
    base = saved(tmp_path / "base", "", model.config, family, model.shapes | model.buffers)
    config = stored["config"] | {"base_model_name_or_path": str(base)}
    adapter = saved(tmp_path / "adapter", "adapter_", config, name, stored["shapes"])
    merged = open_model(f"hf:{adapter}")
    runtime = Runtime(merged.model, Layout({"data": 1}), devices=jax.devices()[:1])
    found = logits(runtime, *merged.load(runtime, merged.model.vocab), model.tokens)
    assert relative_error(sketch(name, "logits", found), stored["logits"]) < 1e-5
