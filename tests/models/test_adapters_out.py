"""Adapters that go out as `peft` opened them (fixtures/adapters.json has their logits), and are those of the run:
weights that are one array of theirs, and what trains beside them."""

import json

import numpy as np
import pytest
from adapters_out import ADAPTERS, FILE, going_out, written

from axon.checkpoint.huggingface.model import open_model
from axon.errors import UserError
from axon.nn.lora import LoRA


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_goes_out_as_peft_opened_it_and_merged_it_is_the_run(name, tmp_path, rng):
    """Run tests/models/adapters_out.py and fixtures/make.py adapters where it goes out otherwise than before."""
    _, own, values, folder = written(name, tmp_path, rng)
    assert json.loads(FILE.read_text())[name] == going_out(folder)
    merged = own.merged(values)
    found = open_model(f"hf:{folder}").load_arrays(own.abstract({path: own.declared[path] for path in merged}))
    for path, value in merged.items():
        scale = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-6 * scale, err_msg=path)


def test_magnitudes_of_a_part_of_an_array_are_refused(tmp_path, rng, monkeypatch):
    monkeypatch.setitem(ADAPTERS, "gpt2 out", LoRA(("*/query", "*/key"), rank=2, dora=True))
    with pytest.raises(UserError, match=r"transformer\.h\.0\.attn\.c_attn is one array of several weights"):
        written("gpt2 out", tmp_path, rng)


def test_a_module_that_is_adapted_and_trained_beside_is_refused(tmp_path, rng, monkeypatch):
    monkeypatch.setitem(ADAPTERS, "gpt2 out", LoRA(rank=2, others=("*/up_bias",)))
    with pytest.raises(UserError, match=r"mlp/up.* has an adapter, and LoRA\.others trains another array"):
        written("gpt2 out", tmp_path, rng)
